"""Inputs and outputs of a step's graph: a table of all tensors, and functions that read and write them.

A row of INPUTS or OUTPUTS holds all that backends know about one tensor. A new input or output is a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

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
from trtspec.methods.step import Step

Taker = Literal[
    "all", "hidden states", "groups", "verifies", "trees", "constraints", "layers", "layers of trees", "linear"
]
"""The graphs that take an input.

"all": every graph of a step. "hidden states": graphs of steps that take hidden states. "groups": of steps whose KV
layers are in several groups. "verifies": of steps that verify drafts. "trees": of steps that verify trees of any
shape. "constraints": graphs that draw for requests with constraints. "layers": graphs of layers alone. "layers of
trees": those of steps that verify trees. "linear": graphs with linear caches (tensorrt/native.py).
"""

Giver = Literal["draws", "verifies", "trees", "makes", "shapes", "scores", "goes on", "hidden states", "constraints"]
"""The graphs that have an output.

They draw, verify drafts, make drafts, shape trees, score drafts, verify and make drafts ("goes on"), return hidden
states or take constraints.
"""

User = Literal["", "sampled", "filtered", "bans", "constraints"]
"""The rows that use an input; "": all rows. In a batch without such rows the input has no elements."""


@dataclass(frozen=True)
class GraphInput:
    """One tensor that graphs take.

    path: its attribute path in StepInputs. dims: names of its sizes (core.py explains them); "0" means no elements.
    dtype: None = the dtype in which the step computes. fill: its value in rows that do not use it, and in rows that pad
    a batch; None = the number of rows of a request. values: its lowest value, and the name of its highest value.
    known_if_uniform: a uniform graph computes it.
    """

    path: str
    dims: tuple[str, ...]
    dtype: torch.dtype | None
    fill: int | None = 0
    values: tuple[int, str] | None = None
    taker: Taker = "all"
    user: User = ""
    known_if_uniform: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def part(self) -> str:
        """Path of the value in StepInputs that has the tensor as a field; "": StepInputs itself."""
        return self.path.rpartition(".")[0]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape. sizes: the sizes of `dims`, by name."""
        return tuple(sizes[dim] for dim in self.dims)

    def left_out(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return the tensor without elements that replaces it if no row uses it. Constraints keep their R rows."""
        shape = (rows, 0) if len(self.dims) == 2 else (rows if self.user == "constraints" else 0,)
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def unused(self, rows: int) -> Tensor:
        """Return the tensor that a graph with this input gets if no row uses it. Only constraints may be empty."""
        if self.user == "constraints":
            return self.left_out(rows)
        return torch.full((rows, 1)[: len(self.dims)], cast("int", self.fill), dtype=self.dtype)


@dataclass(frozen=True)
class GraphOutput:
    """One tensor that graphs return.

    path: its attribute path in StepOutputs. dims: names of its sizes, without a last size that is the model's own.
    dtype: None = the dtype in which the step computes.
    """

    name: str
    path: str
    dims: tuple[str, ...]
    dtype: torch.dtype | None
    giver: Giver
    extra_columns: int | None = None  # in tensors made for the next step, number of columns that are not drafts


def _constraint(name: str, dims: tuple[str, ...], dtype: torch.dtype, fill: int = 0) -> GraphInput:
    return GraphInput(f"spec.constraints.{name}", dims, dtype, fill, taker="constraints", user="constraints")


_bool, _i32, _i64, _f32 = torch.bool, torch.int32, torch.int64, torch.float32

STARTS = "B + 1"
SLOT_ROWS = "slot_rows"
# In the order in which graphs take them.
INPUTS = {
    row.name: row
    for row in (
        GraphInput("attn.cu_q_lens", (STARTS,), _i32, taker="layers"),
        GraphInput("attn.tree_base", ("B",), _i32, taker="layers of trees"),
        GraphInput("attn.ancestors", ("T", "depth"), _i32, fill=-1, taker="layers of trees"),
        GraphInput("input_ids", ("T",), _i64, values=(0, "id")),
        GraphInput("hidden_states", ("T", "width"), None, taker="hidden states"),
        GraphInput("attn.kv_lens", ("B",), _i32, fill=None, values=(1, "slots")),
        GraphInput("attn.block_tables", ("B", "columns"), _i32, values=(0, "block")),
        GraphInput("attn.tree_mask", ("0",), _i32),
        GraphInput("attn.slot_rows", ("slot_rows",), _i32, taker="linear"),  # only its size is used
        GraphInput("attn.group_tables", ("groups", "B", "group_columns"), _i32, taker="groups"),
        GraphInput("spec.seq_lens", ("B",), _i32, known_if_uniform=True),
        GraphInput("spec.gather_ids", ("R",), _i64, known_if_uniform=True),
        GraphInput("spec.draft_tokens", ("G", "K"), _i64, taker="verifies", known_if_uniform=True),
        GraphInput("spec.draft_parents", ("G", "K"), _i64, fill=-1, taker="trees"),
        GraphInput("spec.draft_lens", ("B",), _i32, taker="verifies", known_if_uniform=True),
        GraphInput("spec.next_prompt_token", ("B",), _i64, values=(-1, "id"), taker="verifies", known_if_uniform=True),
        GraphInput("spec.forced_accept", ("B",), _i32, fill=-1, taker="verifies"),
        GraphInput("spec.sampling.greedy", ("R",), _bool, fill=1),
        GraphInput("spec.sampling.positions", ("R",), _i64, known_if_uniform=True),
        GraphInput("spec.sampling.seeds", ("R",), _i64, user="sampled"),
        GraphInput("spec.sampling.temperatures", ("R",), _f32, user="sampled"),
        GraphInput("spec.sampling.top_ks", ("R",), _i32, user="filtered"),
        GraphInput("spec.sampling.top_ps", ("R",), _f32, fill=1, user="filtered"),
        GraphInput("spec.sampling.min_ps", ("R",), _f32, user="filtered"),
        GraphInput("spec.sampling.ban_ids", ("R", "bans"), _i32, fill=-1, user="bans"),
        GraphInput("spec.sampling.ban_until", ("R", "bans"), _i64, user="bans"),
        _constraint("history", ("R", "known"), _i32),
        _constraint("prompt_lens", ("R",), _i64),
        _constraint("penalties", ("R", "kinds"), _f32),  # 3, or 0 if no row has penalties
        _constraint("bias_ids", ("R", "biases"), _i32),
        _constraint("bias_values", ("R", "biases"), _f32),
        _constraint("allow_mask", ("R", "words"), _i32, fill=-1),  # every token may be drawn
    )
}

# In the order in which graphs return them.
OUTPUTS = {
    row.name: row
    for row in (
        GraphOutput("tokens", "tokens", ("R",), _i64, "draws"),
        GraphOutput("new_tokens", "verdict.tokens", ("B", "K + 1"), _i64, "verifies"),
        GraphOutput("num_tokens", "verdict.num_tokens", ("B",), _i64, "verifies"),
        GraphOutput("path", "verdict.path", ("B", "K + 1"), _i64, "trees"),
        GraphOutput("next_draft_tokens", "proposal.draft_tokens", ("B", "K"), _i64, "makes", extra_columns=0),
        GraphOutput("next_draft_parents", "proposal.draft_parents", ("B", "K"), _i64, "shapes", extra_columns=0),
        GraphOutput("next_draft_lens", "proposal.draft_lens", ("B",), _i32, "makes"),
        GraphOutput("next_draft_scores", "proposal.draft_scores", ("B", "K"), _f32, "scores", extra_columns=0),
        GraphOutput("next_new_tokens", "next_new_tokens", ("B", "K + 1"), _i64, "goes on", extra_columns=1),
        GraphOutput("next_kv_lens", "next_kv_lens", ("B",), _i32, "goes on"),
        GraphOutput("hidden_states", "hidden_states", ("T",), None, "hidden states"),
        GraphOutput("logits", "logits", ("R",), _f32, "constraints"),
    )
}


def input_names(step: Step, uniform: bool = False, grouped: bool = False, constraints: bool = False) -> tuple[str, ...]:
    """Names of the tensors that a step's graph takes, in order.

    grouped: include the block tables of further KV groups. constraints: include the tensors of LogitConstraints.
    """
    takes: dict[Taker, bool] = {
        "all": True,
        "hidden states": step.hidden_width > 0,
        "groups": grouped,
        "verifies": step.verifies_drafts,
        "trees": step.takes_trees,
        "constraints": constraints,
        "layers": False,
        "layers of trees": False,
        "linear": False,  # TensorRT's network gets it in addition to those of the step's graph
    }
    return tuple(name for name, row in INPUTS.items() if takes[row.taker] and not (uniform and row.known_if_uniform))


def layer_inputs(names: Sequence[str], trees: bool = False) -> list[str]:
    """Names of the tensors that a graph of layers takes, if graphs of the whole step take `names`.

    trees: the step verifies trees.
    """
    takers = ("layers", "layers of trees") if trees else ("layers",)
    return [name for name, row in INPUTS.items() if row.part == "attn" and (name in names or row.taker in takers)]


def output_names(step: Step, constraints: bool = False) -> tuple[str, ...]:
    """Names of the tensors that a step's graph returns, in order. constraints: same meaning as in input_names."""
    gives: dict[Giver, bool] = {
        "draws": step.draws,
        "verifies": step.verifies_drafts,
        "trees": step.tree is not None,
        "makes": step.makes_drafts,
        "shapes": step.shapes_trees,
        "scores": step.gives_scores,
        "goes on": step.verifies_drafts and step.makes_drafts,
        "hidden states": step.gives_hidden_states,
        "constraints": constraints,
    }
    return tuple(name for name, row in OUTPUTS.items() if gives[row.giver])


def step_inputs(tensors: Mapping[str, Tensor], next_draft_len: int = 0, width: int = 0) -> StepInputs:
    """Build StepInputs from the tensors of `input_names`, for a uniform graph if `width` is given."""
    lens, input_ids = tensors["kv_lens"], tensors["input_ids"]
    if width:
        tensors = {**tensors, **_known_if_uniform(input_ids, lens, width)}
        if width > 1:
            tensors["input_ids"] = input_ids.clamp(min=0)  # -1: a missing draft
        cu_q_lens = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device) * width
    else:
        cu_q_lens = F.pad(tensors["seq_lens"].cumsum(0, dtype=torch.int32), (1, 0))
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(INPUTS[name].part, {})[name] = tensor
    attn = AttnMetadata(cu_q_lens, **parts["attn"], width=width)
    plain = SpecMetadata.plain((), attn, SamplingTensors(**parts["spec.sampling"]))
    constraints = LogitConstraints(**parts["spec.constraints"]) if "spec.constraints" in parts else None
    plain = replace(plain, next_draft_len=next_draft_len, constraints=constraints, is_uniform=width > 0)
    spec = replace(plain, **parts.get("spec", {}))
    return StepInputs(**parts[""], attn=attn, spec=spec)


def _known_if_uniform(input_ids: Tensor, kv_lens: Tensor, width: int) -> dict[str, Tensor]:
    """Compute the inputs that a uniform graph does not take, from input_ids [B * W] and kv_lens [B] of generations."""
    B, W = kv_lens.shape[0], width
    first = kv_lens[:, None].long() - W + 1  # position of the first token that a request's rows draw
    return {
        "seq_lens": torch.full_like(kv_lens, W),
        "gather_ids": torch.arange(B * W, device=kv_lens.device),
        "draft_tokens": input_ids.view(B, W)[:, 1:].contiguous(),
        "draft_lens": torch.full_like(kv_lens, W - 1),
        "next_prompt_token": torch.full((B,), -1, device=kv_lens.device),
        "positions": (first + torch.arange(W, device=kv_lens.device)).view(-1),
    }


def graph_reader(names: Sequence[str]) -> Callable[[StepInputs], tuple[Tensor, ...]]:
    """Return a function that reads these tensors from StepInputs; missing constraints become empty tensors."""
    constraints = [name for name in names if INPUTS[name].user == "constraints"]
    if constraints:
        first = graph_reader(names[: -len(constraints)])
        of_constraints, unused = attrgetter(*constraints), (torch.empty(0),) * len(constraints)

        def read(inputs: StepInputs) -> tuple[Tensor, ...]:
            given = inputs.spec.constraints
            return (*first(inputs), *(unused if given is None else of_constraints(given)))

        return read
    return cast("Callable[[StepInputs], tuple[Tensor, ...]]", attrgetter(*(INPUTS[name].path for name in names)))


def graph_inputs(inputs: StepInputs, names: Sequence[str]) -> dict[str, Tensor]:
    """Return a step's inputs as the graph takes them: name -> tensor."""
    return dict(zip(names, graph_reader(names)(inputs), strict=True))


def graph_outputs(outputs: StepOutputs, names: Sequence[str]) -> dict[str, Tensor]:
    """Return a step's outputs as the graph returns them: name -> tensor. names: the result of output_names."""
    return {name: attrgetter(OUTPUTS[name].path)(outputs) for name in names}


def step_outputs(named: Mapping[str, Tensor], next_draft_len: int) -> StepOutputs:
    """Build StepOutputs, as the inverse of graph_outputs. It drops drafts in excess of next_draft_len."""
    parts: dict[str, dict[str, Any]] = {"": {}, "verdict": {}, "proposal": {}}
    if "tokens" not in named:
        parts[""]["tokens"] = torch.empty(0, dtype=torch.int64)
    for name, tensor in named.items():
        row = OUTPUTS[name]
        part, _, field = row.path.rpartition(".")
        if row.extra_columns is not None and tensor.shape[1] != next_draft_len + row.extra_columns:
            tensor = tensor[:, : next_draft_len + row.extra_columns]
        if name == "next_draft_lens" and named["next_draft_tokens"].shape[1] > next_draft_len:
            tensor = tensor.clamp(max=next_draft_len)
        parts[part][field] = tensor
    verdict = Verdict(**parts["verdict"]) if parts["verdict"] else None
    proposal = Proposal(**parts["proposal"]) if parts["proposal"] else None
    return StepOutputs(**parts[""], verdict=verdict, proposal=proposal)
