"""Two drafters of vLLM's newer runner, each a short head on existing workers, and their equations without a cache.

Assistant (Gemma 4's, vllm/model_executor/models/gemma4_mtp.py): its layers have only queries and read the target's KV.
All its passes run at the position of the last known row. StepHead (Step 3.5's, step3p5_mtp.py): it has a module for
each draft. Each module has its own lm_head, and some have a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.e2e.recorded import copied
from tests.models.head_session import states
from tests.models.paper_heads import turned
from trtspec.core import KVLayer, StepInputs, StepOutputs
from trtspec.methods.head import DraftHead
from trtspec.methods.mtp.checkpoint import MtpFamily
from trtspec.methods.mtp.head import MtpHead, MtpModule, MtpSpec
from trtspec.methods.step import DecodeStep, OneEngineStep
from trtspec.models.attention import Attend, Attention, PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.models.layers import Linear, RMSNorm, weight_bytes
from trtspec.ops.elementwise import rotate

EPS = 1e-6


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Set random weights of a size that keeps rows of about 1."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        random = torch.randn(weight.shape, generator=generator)
        weight.data = random / weight.shape[1] ** 0.5 if weight.ndim == 2 else 1 + random / 4
    module.eval().requires_grad_(False)


# -- Gemma 4's assistant -------------------------------------------------------------------------------------------


class QueryLayer(nn.Module):
    """A layer between norms whose attention reads the KV of the target's layer `source`."""

    def __init__(self, target: Decoder, width: int, source: int, scalar: float) -> None:
        super().__init__()
        self.source, self.scalar, self.head_dim = source, scalar, target.spec.head_dim
        all_heads = target.spec.num_heads * self.head_dim
        self.q, self.o = Linear(width, all_heads, bias=False), Linear(all_heads, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, EPS)
        self.norms = nn.ModuleList(RMSNorm(width, EPS) for _ in range(4))
        self.gate_up, self.down = Linear(width, 4 * width, bias=False), Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: PagedAttend) -> Tensor:
        q = self.q_norm(self.q(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)))  # [T, Hq, D]
        x = x + self.norms[1](self.o(attend.query(self.source, rotate(q, cos, sin), scale=1.0).flatten(1)))
        gate, up = self.gate_up(self.norms[2](x)).chunk(2, dim=-1)
        curve = 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)  # GELU, tanh from exp: ops.silu says why
        x = x + self.norms[3](self.down(gate / (1 + torch.exp(-curve)) * up))
        return x * self.scalar


class Assistant(DraftHead):
    """A draft head over the target's KV. sources: for each of its layers, the target's layer that it reads."""

    advance_draft_positions: ClassVar[bool] = False
    reads_target_kv: ClassVar[bool] = True

    def __init__(self, target: Decoder, sources: Sequence[int], width: int = 16, softcap: float = 2.0) -> None:
        B, V = target.spec.hidden_size, target.spec.vocab_size
        super().__init__(V)
        self.softcap = softcap
        self.pre_projection, self.post_projection = Linear(2 * B, width, bias=False), Linear(width, B, bias=False)
        self.layers = nn.ModuleList(QueryLayer(target, width, layer, 0.9 + i / 4) for i, layer in enumerate(sources))
        self.norm, self.lm_head = RMSNorm(width, EPS), Linear(width, V, bias=False, float_out=True)
        randomize(self)
        self.embedding, self.rotary = target.embedding, target.rotary

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: PagedAttend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        x = self.pre_projection(torch.cat((self.embedding(input_ids) * h.shape[1] ** 0.5, h), dim=-1))
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x if rows is None else x[rows])

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        return self.softcap * torch.tanh(self.lm_head(y) / self.softcap)

    def feedback(self, y: Tensor, step: int = 0) -> Tensor:
        return self.post_projection(y)

    def weight_bytes_for(self, num_passes: int) -> int:
        return num_passes * weight_bytes(self)


class AsPlain(OneEngineStep):
    """A step that checks that a launch leaves the target's KV as one without draft layers does, bit for bit."""

    def forward(self, inputs: StepInputs, kv: Sequence[KVLayer]) -> StepOutputs:
        plain = copied(kv[: self.decoder.spec.num_layers])
        DecodeStep(self.decoder)(inputs, plain)
        outputs = super().forward(inputs, kv)
        for layer, (expected, got) in enumerate(zip(plain, kv, strict=False)):
            assert torch.equal(expected[0], got[0]), f"keys of layer {layer}"
            assert torch.equal(expected[1], got[1]), f"values of layer {layer}"
        return outputs


# -- Step 3.5's modules --------------------------------------------------------------------------------------------

STEP = MtpFamily("enorm", "hnorm", "eh_proj", "shared_head.norm", head="shared_head.output")


class GatedAttention(Attention):
    """Attention whose heads' outputs are each multiplied by a sigmoid of x."""

    def __init__(self, spec: MtpSpec, layer: int) -> None:
        super().__init__(spec.layer, layer)
        self.gate = Linear(spec.layer.hidden_size, spec.layer.num_heads, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        share = (1 / (1 + torch.exp(-self.gate(x))))[..., None]  # [T, Hq, 1]
        return super().forward(x, cos, sin, lambda *args: attend(*args) * share, rows)


class StepModule(MtpModule):
    """A module that returns the layer's own output for the next module; its norm applies only to the logits."""

    def __init__(self, spec: MtpSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.norm, self.final_norm = nn.Identity(), self.norm
        self.layer.attention = GatedAttention(spec, layer)


class StepHead(MtpHead):
    """A head with one module per draft. windows: sliding window of each module's layer."""

    def __init__(self, target: Decoder, windows: tuple[int | None, ...]) -> None:
        layer = replace(target.spec, num_layers=1, windows=(None,), qk_norm=True, qkv_bias=False, rms_norm_eps=EPS)
        spec, first = MtpSpec(layer, STEP, len(windows), "model.layers."), target.spec.num_layers
        super().__init__(spec, first)
        windowed = zip(self.kv_layers, windows, strict=True)
        self.kv_layers = tuple(one._replace(window=window) for one, window in windowed)
        self.mtp = nn.ModuleList(StepModule(spec, first + i) for i in range(len(windows)))
        randomize(self)
        self.embedding = target.embedding

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        module = self._module(step)
        return module.head(module.final_norm(y))


# -- the drafters' equations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """The output of a pass at its last row, and the draft taken there."""

    y: Tensor  # [W]
    logits: Tensor  # [V]

    @property
    def draft(self) -> int:
        return int(self.logits.argmax())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma's norm. weight: as in a checkpoint; a loader adds 1 to make it trtspec's."""
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * (1 + weight)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of q [n, Hq, D] at the last n of m positions over k, v [m, Hkv, D] -> [n, Hq, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    n, m = len(q), len(k)
    distance = torch.arange(m - n, m)[:, None] - torch.arange(m)
    hidden = (distance < 0) | (distance >= (window or m))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def rotated(x: Tensor, target: transformers.PreTrainedModel, first: int = 0) -> Tensor:
    """Rotate x [n, heads, D] at the positions from `first` on."""
    cos, sin = (t[0][:, None] for t in target.model.rotary_emb(x, torch.arange(first, first + len(x))[None]))
    return x * cos + turned(x) * sin


def target_kv(target: transformers.PreTrainedModel, tokens: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
    """Return transformers' rotated keys, and its values, of one layer, [n, Hkv, D] each."""
    caught: list[Tensor] = []
    attention = target.model.layers[layer].self_attn
    projections = attention.k_proj, attention.v_proj
    hooks = [one.register_forward_hook(lambda _, __, out: caught.append(out[0])) for one in projections]
    with torch.no_grad():
        target(torch.tensor([list(tokens)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    k, v = (x.unflatten(-1, (-1, attention.head_dim)) for x in caught)
    return rotated(k, target), v


def assistant_passes(
    head: Assistant, target: transformers.PreTrainedModel, known: list[int], num_drafts: int
) -> list[Pass]:
    """Return K passes after the known tokens, all at the position of the last but one."""
    w = dict(head.named_parameters())
    config, last = target.config, len(known) - 2
    h, token, passes = states(target, known[:-1], (-1,))[0][-1:], known[-1], []
    kv = {layer.source: target_kv(target, known[:-1], layer.source) for layer in head.layers}
    for _ in range(num_drafts):
        e = target.get_input_embeddings().weight[[token]] * config.hidden_size**0.5
        x = torch.cat((e, h), dim=-1) @ w["pre_projection.weight"].T
        for i, layer in enumerate(head.layers):
            n = [w[f"layers.{i}.norms.{j}.weight"] for j in range(4)]
            q = (norm(x, n[0]) @ w[f"layers.{i}.q.weight"].T).unflatten(-1, (-1, config.head_dim))
            q = rotated(norm(q, w[f"layers.{i}.q_norm.weight"]), target, last)
            sliding = config.layer_types[layer.source] == "sliding_attention"
            a = dense(q, *kv[layer.source], 1.0, config.sliding_window if sliding else None).flatten(1)
            x = x + norm(a @ w[f"layers.{i}.o.weight"].T, n[1])
            gate, up = (norm(x, n[2]) @ w[f"layers.{i}.gate_up.weight"].T).chunk(2, dim=-1)
            x = x + norm((F.gelu(gate, approximate="tanh") * up) @ w[f"layers.{i}.down.weight"].T, n[3])
            x = x * layer.scalar
        d = norm(x, w["norm.weight"])
        logits = head.softcap * torch.tanh(d @ w["lm_head.weight"].T / head.softcap)
        passes.append(Pass(d[0], logits[0]))
        token, h = passes[-1].draft, d @ w["post_projection.weight"].T
    return passes


def step_passes(head: StepHead, target: transformers.PreTrainedModel, known: list[int]) -> list[Pass]:
    """Return one pass per module over the whole text; each reads the previous outputs, and tokens one further on."""
    num_layers = target.config.num_hidden_layers
    h, _ = states(target, known[:-1], (num_layers - 1,))  # before the target's last norm
    tokens, passes = known[1:], []
    for i, window in enumerate(layer.window for layer in head.kv_layers):
        w = dict(head.mtp[i].named_parameters())
        own = {name: weight - 1 for name, weight in w.items() if "norm" in name}  # as in a checkpoint
        e = target.get_input_embeddings().weight[tokens]
        x = torch.cat((gemma_norm(e, own["token_norm.weight"]), gemma_norm(h, own["hidden_norm.weight"])), dim=-1)
        x = x @ w["projection.weight"].T
        normed = gemma_norm(x, own["layer.attention_norm.weight"])
        qkv = (normed @ w["layer.attention.qkv.weight"].T).unflatten(-1, (-1, target.config.head_dim))
        q, k, v = qkv.split(head.mtp[i].layer.attention.sizes, dim=1)
        q = rotated(gemma_norm(q, own["layer.attention.q_norm.weight"]), target)
        k = rotated(gemma_norm(k, own["layer.attention.k_norm.weight"]), target)
        a = dense(q, k, v, target.config.head_dim**-0.5, window)
        a = a * (normed @ w["layer.attention.gate.weight"].T).sigmoid()[..., None]
        x = x + a.flatten(1) @ w["layer.attention.o.weight"].T
        gate, up = (gemma_norm(x, own["layer.mlp_norm.weight"]) @ w["layer.mlp.gate_up.weight"].T).chunk(2, dim=-1)
        h = x + (F.silu(gate) * up) @ w["layer.mlp.down.weight"].T
        passes.append(Pass(h[-1], gemma_norm(h[-1], own["final_norm.weight"]) @ w["head.weight"].T))
        tokens = [*tokens[1:], passes[-1].draft]
    return passes
