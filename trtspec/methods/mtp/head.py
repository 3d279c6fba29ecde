"""Multi-token prediction: draft modules from the target's checkpoint, or from a checkpoint of their own.

Papers: DeepSeek-AI, "DeepSeek-V3 technical report", arXiv 2412.19437, section 2.2; Xiaomi, "MiMo", arXiv 2505.07608.

Module i at position p reads the token at p + i + 1 and a vector for p. At first the vector is the target's state there,
later a module's output there. The differences between families are in the rows of methods/mtp/checkpoint.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.methods.mtp.checkpoint import MtpFamily
from trtspec.models.attention import Attend
from trtspec.models.decoder import DecoderLayer
from trtspec.models.layers import Linear, RMSNorm, RotaryTable, weight_bytes
from trtspec.models.specs import DecoderSpec


@dataclass(frozen=True)
class MtpSpec:
    """Shapes and switches of MTP modules.

    layer: describes the one decoder layer of each module; the rest is the target's. prefix: the beginning of the
    modules' names in a checkpoint, followed by "i." for module i (models.specs.ArchitectureRow.mtp_prefix).
    """

    layer: DecoderSpec
    family: MtpFamily
    num_modules: int
    prefix: str


class MtpModule(nn.Module):
    """A module norm(layer(projection([norm(h); norm(e)]))), in the order of its family."""

    def __init__(self, spec: MtpSpec, layer: int) -> None:
        super().__init__()
        H, V, eps = spec.layer.hidden_size, spec.layer.vocab_size, spec.layer.rms_norm_eps
        self.hidden_first = spec.family.hidden_first
        self.token_norm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.projection = Linear(2 * H, H, bias=False)
        self.layer = DecoderLayer(spec.layer, layer)
        self.norm = RMSNorm(H, eps)
        self.head = nn.Identity() if spec.family.head is None else Linear(H, V, bias=False, float_out=True)

    def forward(
        self, e: Tensor, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Return the output [T, H] for e, h [T, H], or that of `rows` [R]; the lm_head and the next pass read it."""
        e, h = self.token_norm(e), self.hidden_norm(h)
        x = self.projection(torch.cat((h, e) if self.hidden_first else (e, h), dim=-1))
        return self.norm(self.layer(x, cos, sin, attend, rows))  # type: ignore[no-any-return]


class MtpHead(DraftHead):
    """A target's modules over its embedding; pass i runs module i, and after the last module the first again.

    layer: the index under which the first module's attention asks for KV.
    """

    def __init__(self, spec: MtpSpec, layer: int = 0, max_position: int | None = None) -> None:
        super().__init__(spec.layer.vocab_size, kv_layers=spec.layer.kv_layers * spec.num_modules)
        self.spec = spec
        self.first_layer = layer
        self.rotary = RotaryTable(
            spec.layer.rope, spec.layer.head_dim, max_position or spec.layer.max_position_embeddings
        )
        self.mtp = nn.ModuleList(MtpModule(spec, layer + i) for i in range(spec.num_modules))
        self.embedding: nn.Module = nn.Identity()  # share() fills these
        self.head: nn.Module = nn.Identity()

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's embedding and, where modules have none of their own, its lm_head."""
        self.embedding = embedding
        if self.spec.family.head is None:
            self.head = head

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the module of pass `step`, with the arguments of DraftHead; y is normed already."""
        e = self.embedding(input_ids)  # [T, H]
        if self.spec.family.zero_first:
            e = e.masked_fill((positions == 0)[:, None], 0.0)
        cos, sin = self.rotary(positions, e.dtype)
        return self._module(step)(e, h, cos, sin, attend, rows)  # type: ignore[no-any-return]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Return the logits of the module's own lm_head, or of the target's, for y."""
        return self._lm_head(step)(y)  # type: ignore[no-any-return]

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that the modules and lm_heads of the first num_passes passes read."""
        return sum(weight_bytes(self._module(step), self._lm_head(step)) for step in range(num_passes))

    def _module(self, step: int) -> MtpModule:
        return cast(MtpModule, self.mtp[step % len(self.mtp)])

    def _lm_head(self, step: int) -> nn.Module:
        return self.head if self.spec.family.head is None else self._module(step).head
