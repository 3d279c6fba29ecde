"""What a step's graph takes and gives: its inputs and outputs by name, and how they are read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.core import AttnMetadata, LogitEdits, SamplingTensors, SpecMetadata, StepInputs, StepOutputs
from trtspec.methods.step import Step

_ATTN = ("kv_lens", "block_tables", "tree_mask")  # cu_q_lens follows from seq_lens, and so its size from B
_SAMPLING = tuple(field.name for field in fields(SamplingTensors))
EDITS = tuple(field.name for field in fields(LogitEdits))
"""Inputs of those graphs alone that draw for requests with edits, and that give their logits."""
_OF_SPEC = {field.name for field in fields(SpecMetadata)} - {"spec_dec_mode", "sampling", "edits"}
_KNOWN_IF_UNIFORM = {"seq_lens", "gather_ids", "draft_tokens", "draft_lens", "next_prompt_token", "positions"}
INPUT_SHAPES = {
    "input_ids": ("T",),
    "hidden_states": ("T", "width"),
    "tree_mask": ("0",),
    "block_tables": ("B", "columns"),
    "draft_tokens": ("G", "K"),
    **dict.fromkeys(("kv_lens", "seq_lens", "draft_lens", "next_prompt_token", "forced_accept"), ("B",)),
    **dict.fromkeys(("ban_ids", "ban_until"), ("R", "bans")),
    **dict.fromkeys(("gather_ids", *(name for name in _SAMPLING if not name.startswith("ban"))), ("R",)),
    "history": ("R", "known"),
    "prompt_lens": ("R",),
    "penalties": ("R", "kinds"),  # 3 or, where no row has any, 0
    **dict.fromkeys(("bias_ids", "bias_values"), ("R", "biases")),
    "allow_mask": ("R", "words"),
}

OUTPUT_SHAPES = {
    "tokens": ("R",),
    "new_tokens": ("B", "K + 1"),
    "num_tokens": ("B",),
    "next_draft_tokens": ("B", "K"),
    "next_new_tokens": ("B", "K + 1"),
    "next_kv_lens": ("B",),
    "hidden_states": ("T",),  # and a width of the model's own
    "logits": ("R",),  # and the vocabulary
}

INPUT_DTYPES = {
    "input_ids": torch.int64,
    "kv_lens": torch.int32,
    "block_tables": torch.int32,
    "tree_mask": torch.int32,
    "seq_lens": torch.int32,
    "gather_ids": torch.int64,
    "draft_tokens": torch.int64,
    "draft_lens": torch.int32,
    "next_prompt_token": torch.int64,
    "forced_accept": torch.int32,
    "greedy": torch.bool,
    "positions": torch.int64,
    "seeds": torch.int64,
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
    "ban_ids": torch.int32,
    "ban_until": torch.int64,
    "history": torch.int32,
    "prompt_lens": torch.int64,
    "penalties": torch.float32,
    "bias_ids": torch.int32,
    "bias_values": torch.float32,
    "allow_mask": torch.int32,
}


def input_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a graph's input; dtype: what the step computes in."""
    return dtype if name == "hidden_states" else INPUT_DTYPES[name]


def input_names(step: Step, uniform: bool = False, grouped: bool = False, edits: bool = False) -> tuple[str, ...]:
    """The tensors a step's graph takes, in order; grouped: block tables of further KV groups are among them; edits:
    EDITS are, as the last."""
    hidden = ("hidden_states",) if step.hidden_width else ()
    groups = ("group_tables",) if grouped else ()
    names = ("input_ids", *hidden, *_ATTN, *groups, *step.spec_inputs, *_SAMPLING, *(EDITS if edits else ()))
    return tuple(name for name in names if not (uniform and name in _KNOWN_IF_UNIFORM))


def output_names(step: Step, edits: bool) -> tuple[str, ...]:
    """What a step's graph gives, in order; edits: as of input_names."""
    return (*step.outputs, "logits") if edits else step.outputs


def step_inputs(tensors: Mapping[str, Tensor], next_draft_len: int = 0, width: int = 0) -> StepInputs:
    """From the tensors of `input_names`, those of a uniform graph if `width` is given."""
    lens = tensors["kv_lens"]
    if width:
        tensors = {**tensors, **_known_if_uniform(tensors["input_ids"], lens, width)}
        cu_q_lens = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device) * width
    else:
        cu_q_lens = F.pad(tensors["seq_lens"].cumsum(0, dtype=torch.int32), (1, 0))
    groups = tensors.get("group_tables")
    attn = AttnMetadata(cu_q_lens, **{name: tensors[name] for name in _ATTN}, width=width, group_tables=groups)
    plain = SpecMetadata.plain((), attn, SamplingTensors(**{name: tensors[name] for name in _SAMPLING}))
    spec: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in _OF_SPEC}
    if EDITS[0] in tensors:
        spec["edits"] = LogitEdits(**{name: tensors[name] for name in EDITS})
    batch = replace(plain, next_draft_len=next_draft_len, **spec)
    return StepInputs(tensors["input_ids"], attn, batch, tensors.get("hidden_states"))


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
    """What reads the tensors of those names from a step's inputs; those of a batch without edits are of no elements."""
    edits = [name for name in names if name in EDITS]
    if edits:
        first = graph_reader(names[: -len(edits)])
        of_edits, unused = attrgetter(*edits), (torch.empty(0),) * len(edits)

        def read(inputs: StepInputs) -> tuple[Tensor, ...]:
            given = inputs.spec.edits
            return (*first(inputs), *(unused if given is None else of_edits(given)))

        return read
    parts = {
        "input_ids": "",
        "hidden_states": "",
        **dict.fromkeys((*_ATTN, "group_tables"), "attn."),
        **dict.fromkeys(_SAMPLING, "spec.sampling."),
    }
    return cast(
        "Callable[[StepInputs], tuple[Tensor, ...]]", attrgetter(*(parts.get(name, "spec.") + name for name in names))
    )


def graph_inputs(inputs: StepInputs, names: Sequence[str]) -> dict[str, Tensor]:
    """A step's inputs as the graph takes them."""
    return dict(zip(names, graph_reader(names)(inputs), strict=True))


def graph_outputs(outputs: StepOutputs) -> dict[str, Tensor]:
    """What a step gives, by name: those of its `outputs`."""
    named = {"tokens": outputs.tokens}
    if outputs.proposal is not None and outputs.verdict is None:
        named = {"next_draft_tokens": outputs.proposal.draft_tokens}
    elif outputs.verdict is not None and outputs.proposal is not None:
        assert outputs.next_new_tokens is not None
        assert outputs.next_kv_lens is not None
        named |= {
            "new_tokens": outputs.verdict.tokens,
            "num_tokens": outputs.verdict.num_tokens,
            "next_draft_tokens": outputs.proposal.draft_tokens,
            "next_new_tokens": outputs.next_new_tokens,
            "next_kv_lens": outputs.next_kv_lens,
        }
    if outputs.hidden_states is not None:
        named["hidden_states"] = outputs.hidden_states
    return named
