"""Hooks of the drafting chain, shown by two drafters (newer_heads.py).

The hooks are: passes that stay at one position, another state fed back, layers that read the target's KV, and KV
groups. Every pass is compared with the drafters' equations, in eager mode and exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.checkpoints import make_checkpoint, oracle
from tests.e2e.recorded import copied
from tests.models.head_session import GREEDY, Session, Watching, assert_close, open_session, told
from tests.models.newer_heads import AsPlain, Assistant, Pass, StepHead, assistant_passes, step_passes
from trtspec.backends.export import example_for, export_step
from trtspec.backends.graph_io import graph_inputs, graph_outputs, input_names, output_names, step_inputs
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import AttnMetadata, KVLayer, SamplingTensors, SpecMetadata, StepInputs, StepOutputs
from trtspec.errors import UnsupportedError
from trtspec.kv.groups import with_group_tables
from trtspec.kv.pool import allocate_layers
from trtspec.methods.mtp.worker import MtpWorker
from trtspec.methods.step import DecodeStep, HeadStep, OneEngineStep, Step
from trtspec.methods.worker import SpecWorker
from trtspec.models.attention import Attend
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder

K = 3
VOCAB = 199
TOLERANCE = 1e-4
ACCEPTED = (2, 0, 3, 1)


class WatchingMtp(Watching, MtpWorker):
    """A worker that has a module for each draft and keeps the outputs of every pass."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose first layer has a sliding window and whose other layer sees all tokens."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    window = {"use_sliding_window": True, "sliding_window": 6}
    return make_checkpoint(tmp_path_factory.mktemp("target"), "qwen2", initializer_range=0.06, **layers, **window)


@pytest.fixture(scope="module")
def theirs(target: Path) -> transformers.PreTrainedModel:
    return oracle(target)


@pytest.fixture(scope="module")
def decoder(target: Path) -> Decoder:
    return load_decoder(ModelConfig.from_folder(target), torch.float32)


def open_assistant(decoder: Decoder, *sources: int) -> Session:
    """Open a session of an Assistant. sources: layers of the target that its layers read, (1, 0) if not given."""
    worker = Watching(Assistant(decoder, sources or (1, 0)), K, (-1,))
    return open_session(decoder, worker, prompts())


def open_modules(decoder: Decoder, kind: type[StepHead] = StepHead) -> Session:
    """Open a session of a StepHead whose modules 0 and 2 have a window that differs from the target's."""
    worker = WatchingMtp(kind(decoder, (4, None, 4)), K, (decoder.spec.num_layers - 1,))
    return open_session(decoder, worker, prompts())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (25, 1, 7)]


def check_passes(
    session: Session, theirs: transformers.PreTrainedModel, expected: Callable[[list[int]], list[Pass]]
) -> None:
    """Launch prompts, then drafts of which none, some and all are accepted; rejected drafts must leave no trace."""
    for accepted in (None, *ACCEPTED):
        drafts = [[] if accepted is None else told(theirs, known, accepted, K) for known in session.known]
        outputs = session.launch(drafts)
        assert outputs.verdict is not None
        assert outputs.proposal is not None
        assert outputs.verdict.num_tokens.tolist() == [1 if accepted is None else accepted + 1] * len(session.known)
        for b, known in enumerate(session.known):
            passes = expected(known)
            for j, one in enumerate(passes):
                assert_close(session.worker.rows[j][b], one.y, TOLERANCE)
                assert_close(session.worker.scores[j][b], one.logits, TOLERANCE)
            assert outputs.proposal.draft_tokens[b].tolist() == [one.draft for one in passes]


# -- layers of queries alone, passes at one position ---------------------------------------------------------------


def test_layers_of_queries_alone_read_the_target(decoder: Decoder, theirs: transformers.PreTrainedModel) -> None:
    session = open_assistant(decoder)
    assert len(session.kv) == decoder.spec.num_layers  # the assistant has no KV of its own
    session.step = AsPlain(decoder, session.worker)
    check_passes(session, theirs, lambda known: assistant_passes(session.worker.head, theirs, known, K))


def test_what_reads_the_target_does_not_run_next_to_it(decoder: Decoder) -> None:
    worker = SpecWorker(Assistant(decoder, (0,)), K, (-1,))
    with pytest.raises(UnsupportedError, match=r"read the target's KV.*one_engine=True"):
        HeadStep(worker, decoder.spec.hidden_size, decoder.norm.weight)


# -- a module for each draft, layers in several KV groups ----------------------------------------------------------


def regroup(session: Session) -> None:
    """Set separate tables for all KV groups after the first.

    These tables use other blocks, also scattered, in a cache of twice the size.
    """
    session.kv = [(k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)) for k, v in session.kv]
    half = len(session.kv[0][0]) // 2
    session.group_tables = [
        [[half + (block + group) % half for block in table] for table in session.tables]
        for group in range(max(session.step.kv_groups))
    ]


def test_modules_of_two_kv_groups(decoder: Decoder, theirs: transformers.PreTrainedModel) -> None:
    """Drafts are the same, bit for bit, whether groups share a table, as in the engine, or have their own tables."""
    one, many = open_modules(decoder), open_modules(decoder)
    assert one.step.kv_groups == (0, 1, 2, 1, 2, *(K - 1) * (1,))  # of the target, the modules, kept outputs
    regroup(many)
    check_passes(one, theirs, lambda known: step_passes(one.worker.head, theirs, known))
    scores = one.worker.scores
    check_passes(many, theirs, lambda known: step_passes(many.worker.head, theirs, known))
    assert all(torch.equal(a, b) for a, b in zip(scores, many.worker.scores, strict=True))
    for group, layer in zip(many.step.kv_groups, many.kv, strict=True):
        tables = many.group_tables[group - 1] if group else many.tables
        own = torch.tensor([block for table in tables for block in table])
        for cache in layer:
            assert cache[own].any()
            cache[own] = 0.0
            assert not cache.any()  # no values in blocks of another group or in scratch


class Halved(StepHead):
    """A head that returns half of the next module's and its lm_head's input; halving is exact in floating point."""

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        return super().forward(input_ids, h, positions, attend, step, rows) / 2

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        return super().logits(y * 2, step)

    def feedback(self, y: Tensor, step: int = 0) -> Tensor:
        return y * 2


def test_what_a_module_reads_need_not_be_what_the_one_before_gives(decoder: Decoder) -> None:
    scores = []
    for kind in (StepHead, Halved):
        session = open_modules(decoder, kind)
        session.launch([[]] * len(session.known))
        session.launch([[5, 6, 7]] * len(session.known))
        scores.append(session.worker.scores)
    assert all(torch.equal(a, b) for a, b in zip(*scores, strict=True))


# -- exported ------------------------------------------------------------------------------------------------------


class Recording(OneEngineStep):
    """A step that keeps its inputs and outputs, and KV before and after."""

    seen: list[tuple[StepInputs, list[KVLayer], StepOutputs, list[KVLayer]]]

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        before = copied(kv)
        outputs = super().forward(inputs, kv)
        self.seen.append((inputs, before, outputs, copied(kv)))
        return outputs


def recorded(session: Session, num_launches: int = 3) -> Recording:
    """Record launches of the prompts, then of drafts that are wrong."""
    session.step = step = Recording(session.step.decoder, session.worker)
    step.seen = []
    for number in range(num_launches):
        session.launch([[5, 6, 7] if number else []] * len(session.known))
    return step


def unwatched(step: OneEngineStep, functional: bool = False) -> OneEngineStep:
    """Return the same step with a worker that keeps nothing."""
    kind = MtpWorker if isinstance(step.worker, MtpWorker) else SpecWorker
    worker = kind(cast(Any, step.worker).head, K, step.worker.capture_layers)
    return OneEngineStep(step.decoder, worker, functional)


def example_of(step: Step) -> StepInputs:
    """Return a greedy batch to export with."""
    example = example_for(step, K, 4)
    positions = example.spec.sampling.positions.tolist()
    return replace(
        example, spec=replace(example.spec, sampling=SamplingTensors.of([GREEDY] * len(positions), positions))
    )


@pytest.mark.parametrize(
    "functional", [pytest.param(False, marks=pytest.mark.long, id="mutating"), pytest.param(True, id="functional")]
)
def test_layers_of_queries_alone_are_exported(decoder: Decoder, functional: bool) -> None:
    """One graph for all batches of K drafts returns the eager step's outputs, bit for bit, KV included."""
    step = recorded(open_assistant(decoder, 0))
    twin = unwatched(step, functional)
    program = export_step(twin, example_of(step), copied(step.seen[0][1]))
    for inputs, before, outputs, after in step.seen[1:]:
        kv = copied(before)
        got, changed = program.module()(graph_inputs(inputs, input_names(twin)), kv)
        for name, want in graph_outputs(outputs, output_names(twin)).items():
            assert torch.equal(got[name], want), name
        for layer, expected in zip(changed if functional else kv, after, strict=True):
            assert all(map(torch.equal, layer, expected))


def test_kv_groups_are_exported(decoder: Decoder) -> None:
    """Tables of further KV groups are one more input of the graph, where the example has them.

    Each of the target's two layers is a group.
    """
    step = DecodeStep(decoder)
    example = example_of(step)
    names = input_names(step, grouped=True)
    assert set(names) - set(input_names(step)) == {"group_tables"}
    # The first batch has 4 requests, as in the example. The other has 3 of other lengths in other blocks.
    first = with_group_tables(example.attn, step.kv_groups, [example.attn.block_tables.tolist()])
    other = AttnMetadata.of([2, 9, 1], [7, 9, 4], [[3, 1], [5, 2, 4], [6]])
    other = with_group_tables(other, step.kv_groups, [[[9, 8], [10, 7, 11], [12]]])
    spec = SpecMetadata.plain((0, 1, 2), other, SamplingTensors.of([GREEDY] * 3, [7, 9, 4]))
    kv = allocate_layers(step.kv_layers, 40, 4, torch.float32)
    program = export_step(step, replace(example, attn=first), kv)
    inputs, after = StepInputs(torch.arange(3, 15), other, spec), copied(kv)
    with torch.no_grad():
        want = step(inputs, after)
    got, _ = program.module()(graph_inputs(inputs, names), list(kv))
    assert torch.equal(got["tokens"], want.tokens)
    assert [sorted(set(k.nonzero()[:, 0].tolist())) for k, _ in kv] == [[1, 2, 4, 5, 6], [7, 8, 10, 11, 12]]
    for layer, expected in zip(kv, after, strict=True):
        assert all(map(torch.equal, layer, expected))


class FirstPass(nn.Module):
    """The pass over all rows; it returns the rows that the chain reads, [B, W]."""

    def __init__(self, step: OneEngineStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, tensors: dict[str, Tensor], captured: Tensor, kv: list[KVLayer]) -> Tensor:
        inputs = step_inputs(tensors)
        positions, attend = inputs.attn.positions(captured.shape[0]), self.step.attend(inputs.attn, kv)
        y: Tensor = self.step.worker.first_pass(inputs.input_ids, captured, positions, attend)
        return y[inputs.spec.gather_ids]


class Chain(FirstPass):
    """All further passes, with one row per request in each -> drafts [B, K]."""

    def forward(self, tensors: dict[str, Tensor], hidden: Tensor, kv: list[KVLayer]) -> Tensor:
        inputs = step_inputs(tensors, K, width=1)
        attend, sampling = self.step.attend(inputs.attn, kv), inputs.spec.sampling.advance()
        return self.step.worker.draft_from(hidden, inputs.attn, sampling, K, attend)


@pytest.mark.parametrize(
    "opened",
    [pytest.param(open_assistant, marks=pytest.mark.long, id="assistant"), pytest.param(open_modules, id="modules")],
)
def test_the_first_pass_and_the_chain_are_graphs_by_themselves(
    decoder: Decoder, opened: Callable[[Decoder], Session]
) -> None:
    step = recorded(opened(decoder), 1)
    ((inputs, kv, outputs, _),) = step.seen
    assert outputs.verdict is not None
    assert outputs.proposal is not None
    attend, positions = step.attend(inputs.attn, kv), inputs.attn.positions(len(inputs.input_ids))
    with torch.no_grad():
        _, captured = decoder.capture(inputs.input_ids, positions, attend, step.worker.capture_layers)
        ids = step.worker.prepare_context_input_ids(inputs.input_ids, outputs.verdict.tokens, inputs.attn, inputs.spec)
        given: Tensor = captured
        for module, uniform in ((FirstPass(unwatched(step)), False), (Chain(unwatched(step)), True)):
            tensors = {**graph_inputs(inputs, input_names(step, uniform)), "input_ids": ids if not uniform else ids[:3]}
            given = torch.export.export(module.eval(), (tensors, given, kv), strict=False).module()(tensors, given, kv)
    assert torch.equal(given, outputs.proposal.draft_tokens)
