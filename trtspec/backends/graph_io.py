"""What a step's graph takes and gives: every input and output once, and how they are read and written.

A row of INPUTS or OUTPUTS says all that backends know of one tensor. Another input or output is another row.
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

Taker = Literal["all", "hidden states", "groups", "verifies", "constraints", "layers"]
"""Graphs that take an input: all, or those of steps that take hidden states, whose KV layers are of several groups,
that verify drafts, that draw for requests with constraints; or graphs of layers alone."""

Giver = Literal["draws", "verifies", "makes", "hidden states", "constraints"]
"""Graphs that have an output: those that draw, verify or make drafts, return hidden states, or take constraints."""

User = Literal["", "sampled", "filtered", "bans", "constraints"]
"""Rows that an input is for; "": all. A batch without such rows brings it without elements."""


@dataclass(frozen=True)
class GraphInput:
    """One tensor that graphs take.

    path: where StepInputs has it. dims: what its sizes are called, see core; "0" has no elements. dtype: None = what
    the step computes in. fill: its value in rows that it is not for, and in rows that pad a batch; None = as many as a
    request has rows. values: the lowest, and what the highest is called. known_if_uniform: a uniform graph computes it.
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
        """Which value inside StepInputs has it; "": StepInputs itself."""
        return self.path.rpartition(".")[0]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """sizes: of dims, by name."""
        return tuple(sizes[dim] for dim in self.dims)

    def left_out(self, rows: int, device: torch.device | None = None) -> Tensor:
        """The tensor without elements that replaces it where no row uses it. Those of constraints keep R rows."""
        shape = (rows, 0) if len(self.dims) == 2 else (rows if self.user == "constraints" else 0,)
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def unused(self, rows: int) -> Tensor:
        """The tensor that a graph with this input gets where no row uses it. Only constraints may have no elements."""
        if self.user == "constraints":
            return self.left_out(rows)
        return torch.full((rows, 1)[: len(self.dims)], cast("int", self.fill), dtype=self.dtype)


@dataclass(frozen=True)
class GraphOutput:
    """One tensor that graphs give.

    path: where StepOutputs has it. dims: what its sizes are called, but for a last one that is the model's own. dtype:
    None = what the step computes in. beside: of what is made for the next step, columns beside its drafts.
    """

    name: str
    path: str
    dims: tuple[str, ...]
    dtype: torch.dtype | None
    giver: Giver
    beside: int | None = None


def _constraint(name: str, dims: tuple[str, ...], dtype: torch.dtype) -> GraphInput:
    return GraphInput(f"spec.constraints.{name}", dims, dtype, taker="constraints", user="constraints")


_bool, _i32, _i64, _f32 = torch.bool, torch.int32, torch.int64, torch.float32

STARTS = "B + 1"
# In the order in which graphs take them.
INPUTS = {
    row.name: row
    for row in (
        GraphInput("attn.cu_q_lens", (STARTS,), _i32, taker="layers"),
        GraphInput("input_ids", ("T",), _i64, values=(0, "id")),
        GraphInput("hidden_states", ("T", "width"), None, taker="hidden states"),
        GraphInput("attn.kv_lens", ("B",), _i32, fill=None, values=(1, "slots")),
        GraphInput("attn.block_tables", ("B", "columns"), _i32, values=(0, "block")),
        GraphInput("attn.tree_mask", ("0",), _i32),
        GraphInput("attn.group_tables", ("groups", "B", "group_columns"), _i32, taker="groups"),
        GraphInput("spec.seq_lens", ("B",), _i32, known_if_uniform=True),
        GraphInput("spec.gather_ids", ("R",), _i64, known_if_uniform=True),
        GraphInput("spec.draft_tokens", ("G", "K"), _i64, taker="verifies", known_if_uniform=True),
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
        _constraint("penalties", ("R", "kinds"), _f32),  # 3 or, where no row has any, 0
        _constraint("bias_ids", ("R", "biases"), _i32),
        _constraint("bias_values", ("R", "biases"), _f32),
        _constraint("allow_mask", ("R", "words"), _i32),
    )
}

# In the order in which graphs give them.
OUTPUTS = {
    row.name: row
    for row in (
        GraphOutput("tokens", "tokens", ("R",), _i64, "draws"),
        GraphOutput("new_tokens", "verdict.tokens", ("B", "K + 1"), _i64, "verifies"),
        GraphOutput("num_tokens", "verdict.num_tokens", ("B",), _i64, "verifies"),
        GraphOutput("next_draft_tokens", "proposal.draft_tokens", ("B", "K"), _i64, "makes", beside=0),
        GraphOutput("next_draft_lens", "proposal.draft_lens", ("B",), _i32, "makes"),
        GraphOutput("next_new_tokens", "next_new_tokens", ("B", "K + 1"), _i64, "verifies", beside=1),
        GraphOutput("next_kv_lens", "next_kv_lens", ("B",), _i32, "verifies"),
        GraphOutput("hidden_states", "hidden_states", ("T",), None, "hidden states"),
        GraphOutput("logits", "logits", ("R",), _f32, "constraints"),
    )
}


def input_names(step: Step, uniform: bool = False, grouped: bool = False, constraints: bool = False) -> tuple[str, ...]:
    """Names of the tensors that a step's graph takes, in order.

    grouped: including the block tables of further KV groups. constraints: including those of LogitConstraints.
    """
    takes: dict[Taker, bool] = {
        "all": True,
        "hidden states": step.hidden_width > 0,
        "groups": grouped,
        "verifies": step.verifies_drafts,
        "constraints": constraints,
        "layers": False,
    }
    return tuple(name for name, row in INPUTS.items() if takes[row.taker] and not (uniform and row.known_if_uniform))


def layer_inputs(names: Sequence[str]) -> list[str]:
    """Those that a graph of layers takes, where graphs of the whole step take `names`."""
    return [name for name, row in INPUTS.items() if row.part == "attn" and (name in names or row.taker == "layers")]


def output_names(step: Step, constraints: bool = False) -> tuple[str, ...]:
    """Names of the tensors that a step's graph returns, in order; constraints: as for input_names."""
    gives: dict[Giver, bool] = {
        "draws": step.draws,
        "verifies": step.verifies_drafts,
        "makes": step.makes_drafts,
        "hidden states": step.gives_hidden_states,
        "constraints": constraints,
    }
    return tuple(name for name, row in OUTPUTS.items() if gives[row.giver])


def step_inputs(tensors: Mapping[str, Tensor], next_draft_len: int = 0, width: int = 0) -> StepInputs:
    """From the tensors of `input_names`, those of a uniform graph if `width` is given."""
    lens, input_ids = tensors["kv_lens"], tensors["input_ids"]
    if width:
        tensors = {**tensors, **_known_if_uniform(input_ids, lens, width)}
        if width > 1:
            tensors["input_ids"] = input_ids.clamp(min=0)  # -1: a draft that there is not
        cu_q_lens = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device) * width
    else:
        cu_q_lens = F.pad(tensors["seq_lens"].cumsum(0, dtype=torch.int32), (1, 0))
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(INPUTS[name].part, {})[name] = tensor
    attn = AttnMetadata(cu_q_lens, **parts["attn"], width=width)
    plain = SpecMetadata.plain((), attn, SamplingTensors(**parts["spec.sampling"]))
    constraints = LogitConstraints(**parts["spec.constraints"]) if "spec.constraints" in parts else None
    spec = replace(plain, next_draft_len=next_draft_len, constraints=constraints, **parts.get("spec", {}))
    return StepInputs(**parts[""], attn=attn, spec=spec)


def _known_if_uniform(input_ids: Tensor, kv_lens: Tensor, width: int) -> dict[str, Tensor]:
    """The inputs that a uniform graph does not take: input_ids [B * W], kv_lens [B] of generations."""
    B, W = kv_lens.shape[0], width
    first = kv_lens[:, None].long() - W + 1  # of the tokens that a request's rows draw, where they stand
    return {
        "seq_lens": torch.full_like(kv_lens, W),
        "gather_ids": torch.arange(B * W, device=kv_lens.device),
        "draft_tokens": input_ids.view(B, W)[:, 1:].contiguous(),
        "draft_lens": torch.full_like(kv_lens, W - 1),
        "next_prompt_token": torch.full((B,), -1, device=kv_lens.device),
        "positions": (first + torch.arange(W, device=kv_lens.device)).view(-1),
    }


def graph_reader(names: Sequence[str]) -> Callable[[StepInputs], tuple[Tensor, ...]]:
    """A function that reads these tensors from a step's inputs; without constraints, theirs have no elements."""
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
    """A step's inputs as the graph takes them."""
    return dict(zip(names, graph_reader(names)(inputs), strict=True))


def graph_outputs(outputs: StepOutputs, names: Sequence[str]) -> dict[str, Tensor]:
    """What a step gives as the graph gives it; names: see output_names."""
    return {name: attrgetter(OUTPUTS[name].path)(outputs) for name in names}


def step_outputs(named: Mapping[str, Tensor], next_draft_len: int) -> StepOutputs:
    """The inverse of graph_outputs. Graphs may make more drafts than next_draft_len, the ones that are wanted."""
    parts: dict[str, dict[str, Any]] = {"": {}, "verdict": {}, "proposal": {}}
    if "tokens" not in named:
        parts[""]["tokens"] = torch.empty(0, dtype=torch.int64)
    for name, tensor in named.items():
        row = OUTPUTS[name]
        part, _, field = row.path.rpartition(".")
        if row.beside is not None and tensor.shape[1] != next_draft_len + row.beside:
            tensor = tensor[:, : next_draft_len + row.beside]
        if name == "next_draft_lens" and named["next_draft_tokens"].shape[1] > next_draft_len:
            tensor = tensor.clamp(max=next_draft_len)
        parts[part][field] = tensor
    verdict = Verdict(**parts["verdict"]) if parts["verdict"] else None
    proposal = Proposal(**parts["proposal"]) if parts["proposal"] else None
    return StepOutputs(**parts[""], verdict=verdict, proposal=proposal)
