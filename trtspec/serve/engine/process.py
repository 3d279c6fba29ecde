"""The engine's process: `python -m trtspec.serve.engine.process FD FORMAT LEVEL`.

It talks to the front through the socket FD. FORMAT and LEVEL are those of its log, as in logs.configure.

The front is the HTTP process. One Python thread serves here. Between two steps it reads the front's messages, and after
each step it sends the deltas. So no thread waits for a lock, and a request costs the engine only the time that it takes
in this thread.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import socket
import sys
from typing import Any, NoReturn

from trtspec.engine.background import described
from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.errors import TrtSpecError
from trtspec.llm import LLM
from trtspec.outputs import Logprob
from trtspec.serve.engine.wire import Channel, Delta, EngineInfo, EngineLoad, sampling_params
from trtspec.serve.logs import configure

logger = logging.getLogger(__name__)


class EngineServer:
    """A server that runs the requests from its channel until the channel is closed."""

    def __init__(self, engine: EngineCore, channel: Channel, model: str) -> None:
        self.engine = engine
        self.channel = channel
        self.model = model
        self._samples: dict[int, list[Request]] = {}  # front's id -> samples that have not ended
        self._places: dict[int, tuple[int, int]] = {}  # sample's id -> (front's id, sample index)

    def run(self) -> NoReturn:
        """Serve until the front is gone: EOFError or ConnectionError. Any other exception is a fault of the engine."""
        self.channel.send({"ready": dataclasses.asdict(self.info())})
        while True:
            emissions: list[Emission] = []
            for message in self.channel.receive(wait=not self.engine.has_work):
                if "submit" in message:
                    self.submit(message["submit"], message["prompt"], message["params"])
                else:
                    emissions += self.abort(message["abort"])
            if self.engine.has_work:
                emissions += self.engine.step()
            deltas = [self.delta(emission) for emission in emissions if emission.tokens or emission.finished]
            self.channel.send({"deltas": deltas, "load": dataclasses.asdict(self.load())})

    def submit(self, front_id: int, prompt_ids: list[int], params: dict[str, Any]) -> None:
        """Queue a request, or send a refusal."""
        try:
            samples = self.engine.add_request(prompt_ids, sampling_params(params))
        except TrtSpecError as error:
            self.channel.send({"refused": front_id, "kind": type(error).__name__, "why": str(error)})
            return
        self._samples[front_id] = list(samples)
        self._places.update((sample.request_id, (front_id, index)) for index, sample in enumerate(samples))

    def abort(self, front_id: int) -> list[Emission]:
        """End all samples of a request; unknown and finished requests are ignored."""
        ended = [self.engine.abort(sample.request_id) for sample in self._samples.get(front_id, ())]
        return [emission for emission in ended if emission is not None]

    def delta(self, emission: Emission) -> Delta:
        """Return an emission in the front's form; forget the sample if it has finished."""
        request = emission.request
        front_id, index = self._places[request.request_id]
        if emission.finished:
            del self._places[request.request_id]
            self._samples[front_id].remove(request)
            if not self._samples[front_id]:
                del self._samples[front_id]
        return Delta(
            request=front_id,
            sample=index,
            text=emission.text,
            token_ids=emission.tokens,
            draft_ids=list(emission.drafts),
            num_accepted=emission.num_drafts,
            is_context=emission.is_context,
            finish_reason=request.finish_reason if emission.finished else None,
            stop_reason=request.stop_reason,
            error=None if request.error is None else described(request.error),
            logprobs=None if emission.logprobs is None else [_likely(one) for one in emission.logprobs],
            num_past_end=emission.num_past_end,
            draft_parents=None if emission.draft_parents is None else list(emission.draft_parents),
        )

    def info(self) -> EngineInfo:
        """Facts about the engine, which the front receives once."""
        loop = self.engine.loop
        return EngineInfo(
            model=self.model,
            vocab_size=self.engine.model.vocab_size,
            max_seq_len=self.engine.max_seq_len,
            max_batch_size=loop.scheduler.max_batch_size,
            kv_tokens=loop.scheduler.allocator.capacity,
            mode=loop.input_builder.mode.name,
            max_draft_len=loop.max_depth,
            lossy=loop.input_builder.forced_accept >= 0,
        )

    def load(self) -> EngineLoad:
        """The engine's load now."""
        scheduler, stats = self.engine.loop.scheduler, self.engine.stats
        return EngineLoad(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            kv_used=scheduler.kv_used,
            steps=stats.steps,
            step_seconds=stats.step_time,
            launch_seconds=stats.launch_time,
            preemptions=stats.preemptions,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            drafter_failures=stats.drafter_failures,
        )


def _likely(entry: dict[int, Logprob]) -> list[tuple[int, float, int]]:
    return [(token, one.logprob, one.rank) for token, one in entry.items()]


def main() -> int:
    """Run the engine. The first line from the front holds the arguments of LLM().

    Return the exit status: 0 = the front has closed, 1 = the model cannot be loaded, or the engine failed.
    """
    configure(sys.argv[2], sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front, which then closes the socket
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        (options,) = channel.receive(wait=True)
    except EOFError:
        return 0
    try:
        llm = LLM(**options)
    except (TrtSpecError, OSError) as error:
        channel.send({"unusable": str(error)})
        return 1
    try:
        EngineServer(llm.engine, channel, str(options["model"])).run()
    except (EOFError, ConnectionError):
        llm.shutdown()
        return 0
    except Exception as error:
        logger.exception("the engine failed")
        channel.send({"failed": described(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
