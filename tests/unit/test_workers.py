"""What every one-engine worker does around its draft layers: draw, accept, rewind, and the rows and tokens of drafts.

The worker here has layers that are tables: what they give for a token is known without any arithmetic. Batches come
from the engine's own assembler, so they are the ones that workers meet.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.core import SamplingTensors, StepInputs, StepOutputs
from trtspec.engine.batch import BatchAssembler
from trtspec.engine.request import Request
from trtspec.engine.scheduler import Scheduled
from trtspec.kv.blocks import SequenceKV
from trtspec.kv.rewind import commit
from trtspec.methods import worker as base
from trtspec.methods.head import DraftHead
from trtspec.methods.worker import SpecWorker, draw
from trtspec.models.attention import PagedAttend
from trtspec.modes import SpeculativeDecodingMode
from trtspec.sampling_params import ResolvedSampling

VOCAB = 20
TARGET_IDS = torch.tensor([7, 2, 19, 3, 11, 0, 5])  # of each draft id
GREEDY = ResolvedSampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass
class Call:
    """What a hook was given, and what it answered."""

    step: int
    tokens: Tensor
    hidden: Tensor | None
    positions: Tensor
    answer: Tensor
    kv_lens: Tensor


class TableHead(DraftHead):
    """What its worker's passes put out holds the logits; no pass is its own."""

    def __init__(self, target_ids: Tensor) -> None:
        super().__init__(VOCAB, len(target_ids))
        self.set_vocabulary(target_ids)

    def forward(self, input_ids: Tensor, h: Tensor, positions: Tensor, attend: PagedAttend, step: int = 0) -> Tensor:
        raise NotImplementedError

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        return y[:, :-1]

    def weight_bytes_for(self, num_passes: int) -> int:
        return 0


class Tables(SpecWorker):
    """Logits after token t are row t of a random table, the same in every pass."""

    def __init__(self, max_draft_len: int = 4, greedy: bool = False, target_ids: Tensor = TARGET_IDS) -> None:
        super().__init__(TableHead(target_ids), max_draft_len, (), greedy)
        self.table = torch.randn(VOCAB, len(target_ids), generator=torch.Generator().manual_seed(3))
        self.calls: list[Call] = []
        self.places: list[Tensor] = []  # index of the token that each pass guesses, [B]

    def first_pass(self, next_ids: Tensor, captured: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        rows = torch.arange(len(next_ids))[:, None]  # which row it was, beside the logits
        answer = torch.cat((self.table[next_ids], rows), dim=1)
        self.calls.append(Call(0, next_ids, None, positions, answer, attend.attn.kv_lens))
        return answer

    def next_pass(self, step: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: PagedAttend) -> Tensor:
        answer = torch.cat((self.table[tokens], hidden[:, -1:]), dim=1)
        self.calls.append(Call(step, tokens, hidden, positions, answer, attend.attn.kv_lens))
        return answer

    def sample_drafts(self, step: int, hidden: Tensor, sampling: SamplingTensors) -> Tensor:
        self.places.append(sampling.positions)
        return super().sample_drafts(step, hidden, sampling)


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
        kv=SequenceKV(blocks=[1, 2, 3, 4], committed=committed, draft_len=committed),
        drafts=drafts,
    )


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def random_batch(rng: random.Random) -> tuple[Scheduled, ...]:
    """Contexts that end in this step, chunks that do not, generations with 0 to 4 drafts each; at least one request."""
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


def assembled(batch: tuple[Scheduled, ...], next_draft_len: int = 3, forced: int = -1) -> StepInputs:
    return BatchAssembler(SpeculativeDecodingMode.EAGLE3_ONE_MODEL, 4, forced)(batch, next_draft_len)


def half_right(rng: random.Random, inputs: StepInputs) -> Tensor:
    """Logits [R, V] of a target that says what was drafted about two times of three."""
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
    """The tokens one request gets: `said` [K+1] are the target's own, one after each draft."""
    if not row.emits:
        return []
    kept = 0
    while kept < row.draft_len and row.request.drafts[kept] == said[kept]:
        kept += 1
    if forced >= 0 and not row.is_context:
        kept = min(forced, row.draft_len)
    return said[: kept + 1]


def on_random_batches(test: Callable[[int], None]) -> Callable[..., None]:
    """Many seeds of a batch."""
    return settings(deadline=None, max_examples=100)(given(seed=st.integers(0, 2**32))(test))


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "skip_forward",
        "set_guided_decoder",
        "sample_and_accept_draft_tokens",
        "apply_force_accepted_tokens",
        "draft_sampler_greedy",
        "execute_guided_decoder_if_present",
        "prepare_next_new_tokens",
        "prepare_context_input_ids",
        "sample_tokens_for_batch",
    ],
)
def test_names_that_someone_from_tensorrt_llm_looks_for(name: str) -> None:
    method = getattr(SpecWorker, name)
    assert inspect.isfunction(method)
    assert method.__doc__


def test_forced_acceptance_has_its_upstream_names() -> None:
    assert base.FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR == "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    assert base.get_force_num_accepted_tokens() == 0
    assert Tables(max_draft_len=4).max_draft_len == 4


# -- the step, on every kind of batch ------------------------------------------------------------------------------


@on_random_batches
def test_tokens_are_those_of_strict_acceptance(seed: int) -> None:
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = assembled(batch)
    logits = half_right(rng, inputs)
    outputs = run(Tables(), inputs, logits)
    assert outputs.verdict is not None
    said = inputs.spec.per_request(logits.argmax(-1)).tolist()
    for b, row in enumerate(batch):
        wanted = expected_verdict(row, said[b])
        width = inputs.spec.runtime_draft_len + 1
        assert outputs.verdict.tokens[b].tolist() == wanted + [-1] * (width - len(wanted))
        assert outputs.verdict.num_tokens[b] == len(wanted)


@on_random_batches
def test_the_first_pass_reads_the_token_after_each_row(seed: int) -> None:
    """Inside the prompt its next token, behind a chunk too; then what was accepted; anything for rejected rows."""
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = assembled(batch)
    worker, logits = Tables(), half_right(rng, inputs)
    run(worker, inputs, logits)
    said = inputs.spec.per_request(logits.argmax(-1)).tolist()
    read, positions = worker.calls[0].tokens.tolist(), worker.calls[0].positions.tolist()
    assert len(read) == len(inputs.input_ids)
    assert all(0 <= token < VOCAB for token in read)
    at = 0
    for b, row in enumerate(batch):
        text = row.request.tokens + expected_verdict(row, said[b])
        for position in range(row.request.kv.committed, row.end):
            assert positions[at] == position
            assert position + 1 >= len(text) or read[at] == text[position + 1]
            at += 1


@on_random_batches
def test_what_is_kept_is_what_the_engine_commits(seed: int) -> None:
    """next_kv_lens as rewind.commit has it; next_new_tokens as the assembler will pack the next step."""
    rng = random.Random(seed)
    batch = random_batch(rng)
    inputs = assembled(batch)
    outputs = run(Tables(), inputs, half_right(rng, inputs))
    assert outputs.verdict is not None
    assert outputs.next_kv_lens is not None
    assert outputs.next_new_tokens is not None
    assert outputs.proposal is not None
    assert outputs.next_kv_lens.dtype == inputs.attn.kv_lens.dtype
    for b, row in enumerate(batch):
        count = int(outputs.verdict.num_tokens[b])
        drafts = outputs.proposal.draft_tokens[b].tolist()
        commit(row.request.kv, row.num_rows, count, row.draft_len, draft_layers=True)
        assert outputs.next_kv_lens[b] == row.request.kv.committed == row.request.kv.draft_len
        if count:
            row.request.tokens += outputs.verdict.tokens[b, :count].tolist()
            row.request.drafts = drafts
            following = assembled((Scheduled(row.request, 1 + len(drafts), len(drafts), False),))
            assert outputs.next_new_tokens[b].tolist() == following.input_ids.tolist()


@on_random_batches
def test_each_draft_follows_from_the_one_before(seed: int) -> None:
    """The chain starts at the row of the last token kept, and goes on one position and one draw further each pass."""
    rng = random.Random(seed)
    batch = random_batch(rng)
    K = rng.randint(1, 4)
    inputs = assembled(batch, K)
    worker = Tables()
    outputs = run(worker, inputs, half_right(rng, inputs))
    assert outputs.verdict is not None
    assert outputs.proposal is not None
    assert outputs.next_kv_lens is not None
    drafts = outputs.proposal.draft_tokens
    assert drafts.shape == (len(batch), K)
    assert outputs.proposal.draft_lens.tolist() == [K] * len(batch)
    assert [call.step for call in worker.calls] == list(range(K))
    starts = inputs.attn.cu_q_lens.tolist()
    for b, row in enumerate(batch):
        if not row.emits:
            continue
        kept = int(outputs.next_kv_lens[b])
        token = int(outputs.verdict.tokens[b, int(outputs.verdict.num_tokens[b]) - 1])
        for j in range(K):
            assert drafts[b, j] == TARGET_IDS[worker.table[token].argmax()]
            assert worker.places[j][b] == kept + 1 + j  # kept tokens, the one just drawn, the drafts before
            if j > 0:
                call = worker.calls[j]
                assert call.tokens[b] == token
                assert call.positions[b] == kept + j - 1
                assert call.kv_lens[b] == kept + j
                assert call.hidden is not None
                assert call.hidden[b, -1] == starts[b] + kept - row.request.kv.committed - 1  # of that row, all along
            token = int(drafts[b, j])


def test_without_drafts_wanted_the_draft_layers_run_all_the_same() -> None:
    """K' = 0: their KV has to stay complete."""
    rng = random.Random(1)
    inputs = assembled(random_batch(rng), next_draft_len=0)
    worker = Tables()
    outputs = run(worker, inputs, half_right(rng, inputs))
    assert outputs.proposal is not None
    assert outputs.proposal.draft_tokens.shape == (inputs.spec.batch_size, 0)
    assert outputs.proposal.draft_lens.tolist() == [0] * inputs.spec.batch_size
    assert [call.step for call in worker.calls] == [0]


@pytest.mark.parametrize("forced", [0, 1, 2, 9])
def test_forced_acceptance_is_for_generation_rows(forced: int) -> None:
    """The tensor may say what it likes of a context: nothing was drafted there."""
    for seed in range(40):
        rng = random.Random(seed)
        batch = random_batch(rng)
        inputs = assembled(batch, forced=forced)
        everyone = torch.full_like(inputs.spec.forced_accept, forced)
        inputs = replace(inputs, spec=replace(inputs.spec, forced_accept=everyone))
        logits = half_right(rng, inputs)
        outputs = run(Tables(), inputs, logits)
        assert outputs.verdict is not None
        said = inputs.spec.per_request(logits.argmax(-1)).tolist()
        wanted = [len(expected_verdict(row, said[b], forced)) for b, row in enumerate(batch)]
        assert outputs.verdict.num_tokens.tolist() == wanted
        contexts = [not row.is_context for row in batch]
        applied = Tables().apply_force_accepted_tokens(inputs.spec).tolist()
        assert applied == [forced if generates else -1 for generates in contexts]


@on_random_batches
def test_a_rank_that_does_not_sample_returns_the_same_shapes(seed: int) -> None:
    rng = random.Random(seed)
    inputs = assembled(random_batch(rng), next_draft_len=rng.randint(0, 4))
    real = tensors_of(run(Tables(), inputs, half_right(rng, inputs)))
    empty = tensors_of(Tables().skip_forward(inputs))
    assert {name: (t.shape, t.dtype) for name, t in empty.items()} == {
        name: (t.shape, t.dtype) for name, t in real.items()
    }
    assert empty["verdict.num_tokens"].tolist() == [1] * inputs.spec.batch_size


def tensors_of(value: object, name: str = "") -> dict[str, Tensor]:
    """Every tensor in nested dataclasses, by path."""
    if isinstance(value, Tensor):
        return {name: value}
    if not dataclasses.is_dataclass(value):
        return {}
    found: dict[str, Tensor] = {}
    for part in dataclasses.fields(value):
        found |= tensors_of(getattr(value, part.name), f"{name}.{part.name}".lstrip("."))
    return found


# -- guided decoding -----------------------------------------------------------------------------------------------


class Only:
    """A grammar that knows one word."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: Tensor | None = None

    def execute(self, logits: Tensor) -> Tensor:
        self.seen = logits
        allowed = torch.arange(logits.shape[1]) == self.token
        return logits.masked_fill(~allowed, float("-inf"))


def test_a_guided_decoder_restricts_every_draw() -> None:
    rng = random.Random(2)
    inputs = assembled(random_batch(rng))
    logits = half_right(rng, inputs)
    worker, grammar = Tables(), Only(13)
    assert worker.set_guided_decoder(grammar)
    outputs = run(worker, inputs, logits)
    assert outputs.tokens.tolist() == [13] * len(logits)
    assert grammar.seen is not None
    assert torch.equal(grammar.seen, logits)  # raw: before temperature and filters
    assert worker.set_guided_decoder(None)
    assert torch.equal(run(worker, inputs, logits).tokens, logits.argmax(-1))


# -- drafts --------------------------------------------------------------------------------------------------------


def with_row(logits: Tensor) -> Tensor:
    """Logits as the hidden states that Tables reads them from."""
    return torch.cat((logits, torch.zeros(len(logits), 1)), dim=1)


def test_greedy_drafts_are_target_ids() -> None:
    logits = torch.eye(7)
    worker = Tables()
    assert worker.draft_sampler_greedy(logits, worker.d2t).tolist() == TARGET_IDS.tolist()
    assert worker.draft_sampler_greedy(torch.zeros(1, 7), worker.d2t).tolist() == [7]  # ties: the lowest draft id


def sampled(seed: int) -> ResolvedSampling:
    return ResolvedSampling(greedy=False, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


def test_drafts_use_the_noise_of_the_target_ids_they_stand_for() -> None:
    """A draft whose distribution is the target's, over the same ids in another order, always draws the same."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))
    worker = Tables(target_ids=ids)
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(9))
    tensors = SamplingTensors.of([sampled(seed) for seed in range(200)], list(range(200)))
    wanted = draw(logits, tensors)
    assert len(set(wanted.tolist())) > 10
    assert worker.sample_drafts(0, with_row(logits[:, ids]), tensors).tolist() == wanted.tolist()


def test_a_worker_told_to_be_greedy_ignores_how_requests_sample() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(9))
    tensors = SamplingTensors.of([sampled(seed) for seed in range(50)], list(range(50)))
    best = TARGET_IDS[logits.argmax(-1)].tolist()
    assert Tables(greedy=True).sample_drafts(0, with_row(logits), tensors).tolist() == best
    assert Tables().sample_drafts(0, with_row(logits), tensors).tolist() != best


def test_banned_target_ids_are_not_drafted_until_their_time() -> None:
    """Ids of the target, found among the draft's: 19 is draft id 2. Draft id 3, which stands for 3, is not meant by
    the 2 in the bans, nor is anything by 4 and 8, which the draft cannot say."""
    banned = replace(GREEDY, ban_ids=(19, 4, 8), ban_until=10)
    favourite = torch.tensor([[0.0, 3.0, 9.0, 2.0, 1.0, 0.0, 0.0]])  # 19, then 2, then 3
    worker = Tables()
    drafts = [
        worker.sample_drafts(0, with_row(favourite), SamplingTensors.of([banned], [t])).item() for t in (8, 9, 10, 11)
    ]
    assert drafts == [2, 2, 19, 19]
    also_2, only_4 = (replace(GREEDY, ban_ids=ids, ban_until=10) for ids in ((2, 19), (4,)))
    tensors = SamplingTensors.of([also_2, only_4], [0, 0])  # the shorter list is padded, which bans nothing
    assert worker.sample_drafts(0, with_row(favourite.repeat(2, 1)), tensors).tolist() == [3, 19]


def test_bans_move_with_the_chain() -> None:
    """min_tokens: an id that may not be drawn at the first draft's place may be at the second's."""
    row = request(0, [1, 1, 1], 3, 0, [])
    row.sampling = replace(GREEDY, ban_ids=(19,), ban_until=5)  # tokens 3 and 4 must not be it
    worker = Tables()
    worker.table[:] = torch.tensor([0.0, 1.0, 9.0, 0.0, 0.0, 0.0, 0.0])  # always 19, else 2
    inputs = assembled((Scheduled(row, 3, 0, True),), next_draft_len=3)
    outputs = run(worker, inputs, torch.zeros(1, VOCAB))
    assert outputs.proposal is not None
    assert outputs.proposal.draft_tokens.tolist() == [[2, 19, 19]]  # tokens 4, 5, 6


@pytest.mark.parametrize("logits", [torch.zeros(1, 7), torch.full((1, 7), float("nan"))], ids=["banned", "NaN"])
def test_a_draft_that_can_say_nothing_says_anything(logits: Tensor) -> None:
    """A guess must not fail a request: it is an id of the target all the same."""
    nothing = replace(GREEDY, ban_ids=tuple(TARGET_IDS.tolist()), ban_until=10)
    for worker in (Tables(), Tables(greedy=True)):
        assert 0 <= worker.sample_drafts(0, with_row(logits), SamplingTensors.of([nothing], [0])).item() < VOCAB


def test_nothing_to_draw_from_reaches_neither_table_nor_kv() -> None:
    """NaN logits of one request: the id that says so is past any table's end; the others' drafts are as without it."""
    inputs = assembled(random_batch(random.Random(5)))
    logits = half_right(random.Random(5), inputs)
    alone = run(Tables(), inputs, logits)
    broken = logits.clone()
    broken[inputs.spec.logits_rows()[-1]] = float("nan")
    outputs = run(Tables(), inputs, broken)
    assert outputs.verdict is not None
    assert outputs.verdict.tokens[-1, 0] == 2**63 - 1
    assert alone.proposal is not None
    assert outputs.proposal is not None
    assert torch.equal(outputs.proposal.draft_tokens[:-1], alone.proposal.draft_tokens[:-1])
