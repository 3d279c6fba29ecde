"""Medusa (Cai et al., arXiv 2401.10774): heads side by side, all of which read one hidden state of the target.

The state h is the target's state of the last accepted token, after its final norm. The target itself samples the next
token from h. Head i guesses the token i + 1 places after that next token:

    x = h;  x = x + silu(W_l x [+ b_l]) for each of its blocks;  logits = lm_head_i(x)

No head reads a token, or the guess of another head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.attention import Attend
from trtspec.models.layers import Linear, weight_bytes
from trtspec.ops import silu


@dataclass(frozen=True)
class MedusaSpec:
    """Shapes and switches of a set of Medusa heads.

    num_layers: number of blocks in each of the num_heads heads. num_lm_heads: num_heads, 1 = one for all heads, 0 = the
    target's.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int
    num_lm_heads: int
    bias: bool = False
    logit_scale: float = 1.0


class MedusaHead(DraftHead):
    """A set of Medusa heads; pass i runs head i.

    Where the checkpoint has no lm_head, `share` puts the target's in its place.
    """

    reads_drafts = False

    def __init__(self, spec: MedusaSpec) -> None:
        super().__init__(spec.vocab_size, spec.draft_vocab_size)
        self.spec = spec
        H = spec.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(Linear(H, H, spec.bias) for _ in range(spec.num_layers)) for _ in range(spec.num_heads)
        )
        self.heads = nn.ModuleList(
            Linear(H, spec.draft_vocab_size, bias=False, float_out=True) for _ in range(spec.num_lm_heads)
        )

    def share(self, embedding: nn.Module, head: nn.Module) -> None:
        """Use the target's lm_head if the checkpoint has none."""
        if not self.spec.num_lm_heads:
            self.heads = nn.ModuleList([head])

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return h of `rows` as it is, because every head reads the same state."""
        return h if rows is None else h[rows]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Return the logits of head `step` for y."""
        for block in self._blocks(step):
            y = y + silu(block(y))
        logits: Tensor = self._lm_head(step)(y)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale

    def _blocks(self, step: int) -> nn.ModuleList:
        blocks = self.blocks[step]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def _lm_head(self, step: int) -> nn.Module:
        return self.heads[min(step, len(self.heads) - 1)]

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that the first num_passes heads read."""
        return sum(weight_bytes(self._blocks(step), self._lm_head(step)) for step in range(num_passes))
