"""The tables of graph inputs and outputs agree with the fields of the step's values, and lack none of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from trtspec.backends.export import example_batch
from trtspec.backends.graph_io import (
    INPUTS,
    OUTPUTS,
    _known_if_uniform,
    graph_inputs,
    graph_outputs,
    input_names,
    output_names,
    step_inputs,
    step_outputs,
)
from trtspec.config.tree import DraftTree, DynamicTree
from trtspec.core import (
    AttnMetadata,
    LogitConstraints,
    Proposal,
    SamplingTensors,
    SpecMetadata,
    StepInputs,
    StepOutputs,
    Verdict,
)
from trtspec.methods.draft_model.translated import TranslatedStep
from trtspec.methods.step import CaptureStep, DecodeStep, HeadStep, OneEngineStep, Step
from trtspec.methods.tree import TreeTables

K, B, WIDTH = 3, 4, 8
PARTS = {
    "": StepInputs,
    "attn": AttnMetadata,
    "spec": SpecMetadata,
    "spec.sampling": SamplingTensors,
    "spec.constraints": LogitConstraints,
}


def tensors_of(value: type) -> list[str]:
    return [field.name for field in fields(value) if str(field.type) in ("Tensor", "Tensor | None")]


@pytest.mark.parametrize("part", PARTS)
def test_every_tensor_of_a_step_is_an_input(part: str) -> None:
    rows = [row.name for row in INPUTS.values() if row.part == part and row.taker != "linear"]  # a size alone
    assert sorted(rows) == sorted(tensors_of(PARTS[part]))


def test_sampling_and_constraints_are_in_the_order_of_their_fields() -> None:
    """The inputs are in the order of the fields. Graphs that are already built take them in this order."""
    for part in ("spec.sampling", "spec.constraints"):
        assert [row.name for row in INPUTS.values() if row.part == part] == tensors_of(PARTS[part])


def test_a_batch_has_what_the_rows_say() -> None:
    """The tensors of a batch have the dtype and number of sizes of their rows. Sizes of equal names are equal."""
    example = example_batch(K, 4, words=4)
    states = torch.zeros(example.input_ids.shape[0], WIDTH)
    tables = example.attn.block_tables[None].repeat(2, 1, 1)
    parents = torch.full_like(example.spec.draft_tokens, -1)
    example = replace(example, hidden_states=states, attn=replace(example.attn, group_tables=tables))
    example = replace(example, spec=replace(example.spec, draft_parents=parents))
    tree = TreeTables.of(DynamicTree(K, K))
    example = tree.with_ancestors(example, tree.ancestors(example))
    sizes: dict[str, int] = {"0": 0, "K": K, "width": WIDTH, "B": B, "G": 2, "R": 2 + 2 * (K + 1)}
    for name, tensor in graph_inputs(example, tuple(INPUTS)).items():
        row = INPUTS[name]
        assert tensor.dtype == (row.dtype or states.dtype), name
        assert len(row.dims) == tensor.ndim, name
        for dim, size in zip(row.dims, tensor.shape, strict=True):
            assert sizes.setdefault(dim, size) == size, (name, dim)
        if row.values is not None:
            assert int(tensor.min()) >= row.values[0], name


def test_what_is_read_is_written_back() -> None:
    example = example_batch(K, 4, words=4)
    rare = ("groups", "hidden states", "trees", "layers", "layers of trees", "linear")
    names = [name for name, row in INPUTS.items() if row.taker not in rare]
    tensors = graph_inputs(example, names)
    again = graph_inputs(step_inputs(tensors, K), names)
    assert all(torch.equal(tensors[name], again[name]) for name in names)
    assert step_inputs(tensors, K).spec.next_draft_len == K


def test_a_uniform_graph_computes_what_it_does_not_take() -> None:
    example = example_batch(K, 4, uniform=True)
    computed = _known_if_uniform(example.input_ids, example.attn.kv_lens, K + 1)
    assert computed.keys() == {name for name, row in INPUTS.items() if row.known_if_uniform}
    for name, tensor in graph_inputs(example, tuple(computed)).items():
        assert computed[name].dtype == tensor.dtype, name
        assert computed[name].shape == tensor.shape, name


@pytest.mark.parametrize("name", [name for name, row in INPUTS.items() if row.user])
def test_what_stands_for_an_unused_input(name: str) -> None:
    row = INPUTS[name]
    unused, left_out = row.unused(5), row.left_out(5)
    assert unused.dtype == left_out.dtype == row.dtype
    assert unused.ndim == left_out.ndim == len(row.dims)
    assert unused.shape[0] == 5
    assert left_out.numel() == 0 or row.dims == ("R",)
    assert set(unused.flatten().tolist()) <= {row.fill}


def of_outputs() -> set[str]:
    parts = {"": StepOutputs, "verdict": Verdict, "proposal": Proposal}
    return {f"{part}.{name}".removeprefix(".") for part, value in parts.items() for name in tensors_of(value)}


# A chain's probabilities and KV lengths stay on the host.
NO_OUTPUTS = {"proposal.draft_probs", "proposal.draft_kv_lens"}


def test_every_tensor_that_a_step_gives_is_an_output() -> None:
    assert {row.path for row in OUTPUTS.values()} == of_outputs() - NO_OUTPUTS


GIVEN = {
    DecodeStep: ("tokens",),
    TranslatedStep: ("tokens",),
    CaptureStep: ("tokens", "hidden_states"),
    OneEngineStep: (
        "tokens",
        "new_tokens",
        "num_tokens",
        "next_draft_tokens",
        "next_draft_lens",
        "next_new_tokens",
        "next_kv_lens",
    ),
    HeadStep: ("next_draft_tokens", "next_draft_lens"),
}
FIRST = ("kv_lens", "block_tables", "tree_mask", "seq_lens", "gather_ids")
VERIFIED = ("draft_tokens", "draft_lens", "next_prompt_token", "forced_accept")


@pytest.mark.parametrize("kind", GIVEN)
def test_what_the_graph_of_each_step_takes_and_gives(kind: type[Step]) -> None:
    """The inputs and outputs of each step are in a fixed order, which is part of every engine that is built."""
    step = kind.__new__(kind)
    torch.nn.Module.__init__(step)
    step._hidden_width = WIDTH
    step._tree = None
    if kind in (OneEngineStep, HeadStep):
        step.worker = torch.nn.Module()
        step.worker.tree, step.worker.gives_scores = None, False
    states = ("hidden_states",) if kind is HeadStep else ()
    verified = VERIFIED if kind is OneEngineStep else ()
    sampling, constraints = tensors_of(SamplingTensors), tensors_of(LogitConstraints)
    assert input_names(step) == ("input_ids", *states, *FIRST, *verified, *sampling)
    assert input_names(step, grouped=True)[len(states) + 4] == "group_tables"
    assert input_names(step, constraints=True) == (*input_names(step), *constraints)
    known = {*FIRST[3:], *VERIFIED[:3], "positions"}
    assert input_names(step, uniform=True) == tuple(name for name in input_names(step) if name not in known)
    if kind is OneEngineStep:
        step.worker.tree = TreeTables.of(DraftTree(((0,), (1,))))
        assert output_names(step) == (*GIVEN[kind][:3], "path", *GIVEN[kind][3:])
        step.worker.tree = None
    assert output_names(step) == GIVEN[kind]
    assert output_names(step, constraints=True) == (*GIVEN[kind], "logits")
    if kind in (OneEngineStep, HeadStep):
        step.worker.gives_scores = True
        lens = GIVEN[kind].index("next_draft_lens") + 1
        assert output_names(step) == (*GIVEN[kind][:lens], "next_draft_scores", *GIVEN[kind][lens:])


@pytest.mark.parametrize("kind", [DecodeStep, CaptureStep])
def test_a_target_with_a_tree_accepts_drafts(kind: type[Step]) -> None:
    step = kind.__new__(kind)
    torch.nn.Module.__init__(step)
    step._tree = TreeTables.of(DraftTree(((0,), (1,))))
    assert set(input_names(step)) == {"input_ids", *FIRST, *VERIFIED, *tensors_of(SamplingTensors)}
    assert output_names(step) == ("tokens", "new_tokens", "num_tokens", "path", *GIVEN[kind][1:])
    fixed = input_names(step)
    step._tree = TreeTables.of(DynamicTree(depth=2, num_nodes=4))
    assert set(input_names(step)) - set(fixed) == {"draft_parents"}


def test_outputs_are_read_back_and_cut_to_the_drafts_that_were_asked_for() -> None:
    sizes = {"B": B, "R": 9, "T": 11, "K": K, "K + 1": K + 1}
    named: dict[str, Tensor] = {}
    for name, row in OUTPUTS.items():
        shape = [sizes[dim] for dim in row.dims]
        named[name] = torch.arange(torch.Size(shape).numel()).view(shape).to(row.dtype or torch.float32)
    outputs = step_outputs(named, K)
    assert graph_outputs(outputs, tuple(named)).keys() == named.keys()
    assert all(tensor is named[name] for name, tensor in graph_outputs(outputs, tuple(named)).items())
    assert outputs.proposal is not None

    fewer = graph_outputs(step_outputs(named, 1), tuple(named))
    assert torch.equal(fewer["next_draft_lens"], named["next_draft_lens"].clamp(max=1))
    assert torch.equal(fewer["next_draft_tokens"], named["next_draft_tokens"][:, :1])
    assert torch.equal(fewer["next_new_tokens"], named["next_new_tokens"][:, :2])
    assert torch.equal(fewer["new_tokens"], named["new_tokens"])


def test_outputs_of_a_head_are_a_proposal_alone() -> None:
    drafts, lens = torch.zeros(B, K, dtype=torch.int64), torch.full((B,), K, dtype=torch.int32)
    outputs = step_outputs({"next_draft_tokens": drafts, "next_draft_lens": lens}, K)
    assert outputs.tokens.numel() == 0
    assert outputs.verdict is None
    assert outputs.proposal is not None
    assert step_outputs({"tokens": drafts[0]}, 0).proposal is None
