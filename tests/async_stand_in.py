"""An asynchronous executable on the CPU: a thread runs the launches one after the other, with any delay.

It reads what a device would read: inputs are read when a launch runs, not when it is requested. So a host that writes
to them too early spoils them, and the test detects it.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from trtspec.carry import Carry
from trtspec.core import StepInputs, StepOutputs
from trtspec.protocols import Executable


class ThreadLaunch:
    """A launch (protocols.Launch) whose outputs a thread sets."""

    def __init__(self) -> None:
        self.outputs: Future[StepOutputs] = Future()

    def wait(self) -> StepOutputs:
        return self.outputs.result(timeout=60)


class ThreadedExecutable:
    """An executable that runs `inner` in a thread of its own.

    delay: returns the seconds that a launch waits before it starts. before: called with the inputs as they are then. If
    it raises, the launch fails, as do the launches that read its outputs.
    """

    def __init__(
        self,
        inner: Executable,
        max_draft_len: int,
        vocab_size: int,
        delay: Callable[[], float] = lambda: 0.0,
        before: Callable[[StepInputs], None] = lambda inputs: None,
    ) -> None:
        self.inner, self.delay, self.before = inner, delay, before
        self.max_draft_len, self.vocab_size = max_draft_len, vocab_size
        self.new_tokens = torch.zeros(0, max_draft_len + 1, dtype=torch.int64)
        self.kept_lens = torch.zeros(0, dtype=torch.int32)
        self.queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self.waiting = self.most_waiting = self.failures = 0
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, inputs: StepInputs, carry: Carry | None = None) -> ThreadLaunch:
        launch, copy = ThreadLaunch(), tensors_of(inputs)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)

        def work() -> None:
            time.sleep(self.delay())
            try:
                self.before(inputs)
                outputs = self._step(inputs, carry)
                assert all(map(torch.equal, copy, tensors_of(inputs))), "inputs were written to while in flight"
            except BaseException as error:
                self.failures += 1
                self.waiting -= 1
                self.new_tokens, self.kept_lens = torch.zeros(0, self.max_draft_len + 1), torch.zeros(0)
                launch.outputs.set_exception(error)
            else:
                self.waiting -= 1  # before anybody learns of the result, and launches again
                launch.outputs.set_result(outputs)

        self.queue.put(work)
        return launch

    def run(self, inputs: StepInputs) -> StepOutputs:
        return self.launch(inputs).wait()

    def _step(self, inputs: StepInputs, carry: Carry | None) -> StepOutputs:
        if carry is not None:
            inputs = carry.apply(inputs, self.new_tokens, self.kept_lens, self.vocab_size)
        outputs = self.inner.run(inputs)
        new_tokens, kept_lens = outputs.next_new_tokens, outputs.next_kv_lens
        if new_tokens is None or kept_lens is None:  # no drafts are made
            new_tokens, kept_lens = outputs.tokens[:, None], inputs.attn.kv_lens
        missing = self.max_draft_len + 1 - new_tokens.shape[1]
        self.new_tokens = torch.nn.functional.pad(new_tokens, (0, missing), value=-99)
        self.kept_lens = kept_lens.clone()
        return outputs

    def _run(self) -> None:
        while True:
            self.queue.get()()


def tensors_of(value: Any) -> list[Tensor]:
    """Copies of all tensors in a step value."""
    if isinstance(value, Tensor):
        return [value.clone()]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in tensors_of(getattr(value, field.name))]
    return []


def random_delay(seed: int, most: float = 0.004) -> Callable[[], float]:
    """A random delay in seconds: often none, sometimes long enough that the host is far ahead."""
    rng = random.Random(seed)
    return lambda: rng.choice((0.0, 0.0, rng.random() * most))


class HostQueue:
    """A backends.cuda.device.WorkQueue on the CPU: a thread does each piece of work with a delay.

    An error is reported at the next mark, once. A graph is work that is done again.
    """

    device = torch.device("cpu")

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self.delay = delay
        self.queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self.error: BaseException | None = None
        self.num_captured = self.num_replayed = self.num_submitted = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self.num_submitted += 1

        def late() -> None:
            time.sleep(self.delay())
            try:
                work()
            except BaseException as error:
                self.error = error

        self.queue.put(late)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        self.submit(work)
        self.mark().wait()

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay

    def mark(self) -> HostMark:
        reached: Future[None] = Future()

        def reach() -> None:
            error, self.error = self.error, None
            if error is None:
                reached.set_result(None)
            else:
                reached.set_exception(error)

        self.queue.put(reach)
        return HostMark(reached)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def _run(self) -> None:
        while True:
            self.queue.get()()


@dataclass(frozen=True)
class HostMark:
    reached: Future[None]

    def wait(self) -> None:
        self.reached.result(timeout=60)
