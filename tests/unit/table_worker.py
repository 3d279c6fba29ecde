"""A worker whose draft layers are tables: their output for a token is known without any arithmetic.

Batches come from the engine's own input builder, so they are the ones that workers get in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.core import SamplingTensors, StepInputs, StepOutputs
from trtspec.engine.batch import InputBuilder
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Scheduled
from trtspec.kv.blocks import SequenceKV
from trtspec.methods.head import DraftHead
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import PagedAttend
from trtspec.modes import SpeculativeDecodingMode
from trtspec.sampling_params import RequestSampling

VOCAB = 20
TARGET_IDS = torch.tensor([7, 2, 19, 3, 11, 0, 5])  # target id of each draft id
GREEDY = RequestSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass
class Call:
    """The arguments of a hook's call, and its answer."""

    step: int
    tokens: Tensor
    hidden: Tensor | None
    positions: Tensor
    answer: Tensor
    kv_lens: Tensor


class TableHead(DraftHead):
    """A head whose logits are columns of what the worker's passes return. It has no pass of its own."""

    def __init__(self, target_ids: Tensor) -> None:
        super().__init__(VOCAB, len(target_ids))
        self.set_vocabulary(target_ids)

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        return y[:, :-1]

    def weight_bytes_for(self, num_passes: int) -> int:
        return 0


class Tables(SpecWorker):
    """A worker whose logits after token t are row t of a random table, the same in every pass."""

    def __init__(self, max_draft_len: int = 4, greedy: bool = False, target_ids: Tensor = TARGET_IDS) -> None:
        super().__init__(TableHead(target_ids), max_draft_len, (), greedy)
        self.table = torch.randn(VOCAB, len(target_ids), generator=torch.Generator().manual_seed(3))
        self.calls: list[Call] = []
        self.places: list[Tensor] = []  # index of the token that each pass guesses, [B]

    def first_pass(
        self,
        next_ids: Tensor,
        captured: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        rows: Tensor | None = None,
    ) -> Tensor:
        indices = torch.arange(len(next_ids))[:, None]  # of each row, appended to its logits
        answer = torch.cat((self.table[next_ids], indices), dim=1)
        self.calls.append(Call(0, next_ids, None, positions, answer, attend.attn.kv_lens))
        return answer if rows is None else answer[rows]

    def next_pass(self, step: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        answer = torch.cat((self.table[tokens], hidden[:, -1:]), dim=1)
        self.calls.append(Call(step, tokens, hidden, positions, answer, attend.attn.kv_lens))
        return answer

    def sample_drafts(
        self, step: int, hidden: Tensor, sampling: SamplingTensors, probs: list[Tensor] | None = None
    ) -> Tensor:
        self.places.append(sampling.positions)
        return super().sample_drafts(step, hidden, sampling, probs)


def request(number: int, tokens: list[int], prompt_len: int, committed: int, drafts: list[int]) -> Request:
    return Request(
        request_id=number,
        tokens=tokens,
        prompt_len=prompt_len,
        sampling=GREEDY,
        length_limit=1000,
        min_tokens=0,
        eos_ids=frozenset(),
        stop_token_ids=frozenset(),
        include_stop=False,
        text=None,
        kv=SequenceKV(blocks=[1, 2, 3, 4], committed=committed, draft_kv_len=committed),
        drafts=drafts,
    )


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def random_batch(rng: random.Random) -> tuple[Scheduled, ...]:
    """A batch of at least one request.

    It has contexts that end in this step, chunks that do not, and generations with 0 to 4 drafts each.
    """
    contexts, generations = [], []
    kinds = [rng.choice(("context", "chunk", "generation", "generation")) for _ in range(rng.randint(1, 6))]
    for number, kind in enumerate(kinds):
        length = rng.randint(2, 12)
        if kind == "generation":
            drafts = tokens_of(rng, rng.randint(0, 4))
            one = request(number, tokens_of(rng, length), length - 1, length - 1, drafts)
            generations.append(Scheduled(one, 1 + len(drafts), len(drafts), False))
        else:
            committed = rng.randint(0, length - 2)
            rows = length - committed if kind == "context" else rng.randint(1, length - committed - 1)
            contexts.append(Scheduled(request(number, tokens_of(rng, length), length, committed, []), rows, 0, True))
    return (*contexts, *generations)


def built_inputs(batch: tuple[Scheduled, ...], next_draft_len: int = 3, forced: int = -1) -> StepInputs:
    return InputBuilder(SpeculativeDecodingMode.EAGLE3_ONE_MODEL, 4, forced).build(batch, next_draft_len)


def half_right(rng: random.Random, inputs: StepInputs) -> Tensor:
    """Logits [R, V] of a target that agrees with about two of three drafts."""
    spec = inputs.spec
    said = torch.tensor([rng.randrange(VOCAB) for _ in range(len(spec.gather_ids))])
    rows, drafts = spec.logits_rows(), spec.drafts_per_request()
    for b in range(spec.num_contexts, spec.batch_size):
        for j in range(int(spec.draft_lens[b])):
            if rng.random() < 0.67:
                said[rows[b, j]] = drafts[b, j]
    return torch.nn.functional.one_hot(said, VOCAB).float()


def run(worker: Tables, inputs: StepInputs, logits: Tensor) -> StepOutputs:
    attend = PagedAttend(inputs.attn, [], ())
    outputs = worker(inputs, torch.empty(len(inputs.input_ids), 0), logits, attend)
    assert isinstance(outputs, StepOutputs)
    return outputs


def expected_verdict(row: Scheduled, said: list[int], forced: int = -1) -> list[int]:
    """Tokens that one request gets: `said` [K+1] are the target's own, one after each draft."""
    if not row.emits:
        return []
    kept = 0
    while kept < row.draft_len and row.request.drafts[kept] == said[kept]:
        kept += 1
    if forced >= 0 and not row.is_context:
        kept = min(forced, row.draft_len)
    return said[: kept + 1]


def on_random_batches(test: Callable[[int], None]) -> Callable[..., None]:
    """Run a test on many seeds of a batch."""
    return settings(deadline=None, max_examples=100)(given(seed=st.integers(0, 2**32))(test))
