"""Draft heads as their papers define them, and one-engine steps that are compared with them pass by pass.

A paper's head consists of plain torch operations on a checkpoint's tensors under their public names. It has no cache:
it computes every pass over the whole text. transformers computes the target's hidden states.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.checkpoints import oracle
from tests.models.head_session import Session, Watching, assert_close, open_session, states, told
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder

K = 4
VOCAB = 199


# -- the papers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """The output of one pass of the head at its last row, and the draft taken there."""

    y: Tensor  # [H]
    logits: Tensor  # [Vd]
    draft: int


class PaperHead(ABC):
    """A head as published, on a checkpoint's tensors under their public names, fp32."""

    def __init__(self, folder: Path, target: transformers.PreTrainedModel) -> None:
        self.w = load_file(folder / "model.safetensors")
        self.config = self.read_config(folder)
        self.embedding = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight)
        self.lm_head = self.w.get("lm_head.weight", target.get_output_embeddings().weight)
        rope = {key: self.config[key] for key in ("rope_parameters", "max_position_embeddings", "head_dim")}
        self.rotary = LlamaRotaryEmbedding(
            transformers.LlamaConfig(
                hidden_size=self.config["hidden_size"], num_attention_heads=self.config["num_attention_heads"], **rope
            )
        )

    def read_config(self, folder: Path) -> dict[str, Any]:
        """Return what config.json says of the head's layers and of the head's own fields."""
        return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]

    @abstractmethod
    def fuse(self, captured: Tensor) -> Tensor:
        """Fuse the target's states of each position [n, ...] -> h [n, H] of the first pass."""

    @abstractmethod
    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        """Run a pass: e [n, H] of the token after each position, h [n, H] -> y [n, H]."""

    @abstractmethod
    def logits(self, y: Tensor) -> Tensor:
        """Map y [H] -> logits [Vd]."""

    def target_id(self, draft_id: int) -> int:
        return draft_id

    def drafts(self, captured: Tensor, following: list[int]) -> tuple[Tensor, list[Pass]]:
        """Run K passes on captured [n, ...] and the token after each position -> y [n, H] of pass 0, all passes.

        Pass 0 reads the tokens 1..n at the positions 0..n-1. Each further pass adds one row at the next position: the
        token just drafted, with the last row's output in place of the target's state.
        """
        tokens, h = list(following), self.fuse(captured)
        first, passes = None, []
        for _ in range(K):
            y = self.forward(self.embedding[tokens], h)
            first = y if first is None else first
            logits = self.logits(y[-1])
            passes.append(Pass(y[-1], logits, self.target_id(int(logits.argmax()))))
            tokens, h = [*tokens, passes[-1].draft], torch.cat((h, y[-1:]))
        assert first is not None
        return first, passes

    # Parts of a decoder layer; `prefix` begins the names of its tensors.

    def attention(self, x: Tensor, prefix: str, window: int | None = None) -> Tensor:
        q, k, v = (
            self.linear(x, f"{prefix}self_attn.{name}_proj").unflatten(-1, (-1, self.config["head_dim"]))
            for name in "qkv"
        )
        if f"{prefix}self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{prefix}self_attn.q_norm"), self.norm(k, f"{prefix}self_attn.k_norm")
        cos, sin = (table[0][:, None] for table in self.rotary(x, torch.arange(len(x))[None]))
        q, k = (a * cos + turned(a) * sin for a in (q, k))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))  # between row and key
        hidden = (distance < 0) | (distance >= (window or len(x)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{prefix}self_attn.o_proj")

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gated = F.silu(self.linear(x, f"{prefix}mlp.gate_proj")) * self.linear(x, f"{prefix}mlp.up_proj")
        return self.linear(gated, f"{prefix}mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.w[f"{name}.weight"]


def turned(x: Tensor) -> Tensor:
    """Turn halves of the last dimension: (x1, x2) -> (-x2, x1)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


# -- trtspec's steps -----------------------------------------------------------------------------------------------


def session_of(
    target: Path,
    load: Callable[[Decoder], DraftHead],
    capture: Sequence[int],
    prompts: list[list[int]],
    kind: Callable[..., Watching] = Watching,
) -> Session:
    """Open a session of a checkpoint in fp32, with K drafts per step."""
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    return open_session(decoder, kind(load(decoder), K, capture), prompts)


def assert_every_pass_is_that_of_the_paper(
    target: Path,
    load: Callable[[Decoder], DraftHead],
    paper_of: Callable[[transformers.PreTrainedModel], PaperHead],
    capture: Sequence[int],
) -> None:
    """Launch prompts, then drafts of which none, some and all are accepted; rejected drafts must leave no trace."""
    theirs, generator = oracle(target), torch.Generator().manual_seed(1)
    paper = paper_of(theirs)
    # One prompt is longer than llama3's original 64 positions; both end inside a block.
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (90, 7)]
    session = session_of(target, load, capture, prompts)
    for accepted in (None, 2, 0, 4, 1):  # None: the prompts
        before = [len(known) - 1 for known in session.known]
        drafts = [[] if accepted is None else told(theirs, known, accepted, K) for known in session.known]
        outputs = session.launch(drafts)
        assert outputs.verdict is not None
        assert outputs.proposal is not None
        assert outputs.verdict.num_tokens.tolist() == [1 if accepted is None else accepted + 1] * 2
        row = 0
        for b, known in enumerate(session.known):
            captured, logits = states(theirs, known[:-1], capture)
            assert known[before[b] + 1 :] == logits[before[b] :].argmax(-1).tolist()
            first, passes = paper.drafts(captured, known[1:])
            start = 0 if accepted is None else before[b]
            kept = len(known) - 1 - start
            assert_close(session.worker.first[row : row + kept], first[start:])
            row += kept if accepted is None else K + 1
            for j, each in enumerate(passes):
                assert_close(session.worker.rows[j][b], each.y)
                assert_close(session.worker.scores[j][b], each.logits)
            assert outputs.proposal.draft_tokens[b].tolist() == [each.draft for each in passes]
