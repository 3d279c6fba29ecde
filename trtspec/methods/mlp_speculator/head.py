"""MLP speculator (Wertheimer et al., arXiv 2404.19124): stages in a row, each a layer over a state and a token.

The state starts as the target's hidden state of the last accepted token, after its final norm. Stage i reads the last
token and guesses the next one. For stage 0 the last token is the one that the target sampled, later the latest draft:

    state = gelu(norm_i(proj_i state + (ew / sw) emb_i[token]));  logits = head_i state
    sw = 0.5^(0.5 / n_predict),  ew = sqrt((1 - sw^2) inner / 2)

norm_i is an RMS norm with weight and bias, and gelu is the exact one. With scale_input the first state is normed and
divided by sqrt 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.methods.head import DraftHead
from trtspec.models.attention import Attend
from trtspec.models.layers import Linear, RMSNorm, _unloaded, weight_bytes

_EPS = 1e-6


@dataclass(frozen=True)
class MLPSpeculatorSpec:
    """Shapes and switches of an MLP speculator.

    num_stages: number of stages present, of the n_predict stages that were trained together. tied: all stages share one
    embedding, norm and head, and all but the first share one proj.
    """

    hidden_size: int
    inner_size: int
    vocab_size: int
    n_predict: int
    num_stages: int
    tied: bool = False
    scale_input: bool = False

    @property
    def token_scale(self) -> float:
        """ew / sw, the factor of the token's embedding."""
        kept = 0.5 ** (1.0 / self.n_predict)  # sw squared
        return float(((1.0 - kept) * self.inner_size / 2 / kept) ** 0.5)

    @property
    def num_shared(self) -> int:
        """Number of embeddings, of norms and of heads."""
        return 1 if self.tied else self.num_stages

    @property
    def num_projs(self) -> int:
        return min(2, self.num_stages) if self.tied else self.num_stages


class ShiftedNorm(nn.Module):
    """An RMS norm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = RMSNorm(size, _EPS)
        self.bias = _unloaded(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.bias  # type: ignore[no-any-return]


class MLPSpeculatorHead(DraftHead):
    """A set of stages; pass i runs stage i."""

    def __init__(self, spec: MLPSpeculatorSpec) -> None:
        super().__init__(spec.vocab_size)
        self.spec = spec
        H, I, V = spec.hidden_size, spec.inner_size, spec.vocab_size  # noqa: E741
        stages = range(spec.num_shared)
        self.embeddings = nn.ModuleList(nn.Embedding(V, I, _weight=_unloaded(V, I)) for _ in stages)
        self.projs = nn.ModuleList(Linear(I if i else H, I, bias=False) for i in range(spec.num_projs))
        self.norms = nn.ModuleList(ShiftedNorm(I) for _ in stages)
        self.heads = nn.ModuleList(Linear(I, V, bias=False, float_out=True) for _ in stages)
        self.input_norm: nn.Module = RMSNorm(H, _EPS, 0.5**0.5) if spec.scale_input else nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run stage `step` on `rows`; y [R, I] is their new state.

        h: the state before, [T, H] in pass 0, then [T, I].
        """
        if rows is not None:
            input_ids, h = input_ids[rows], h[rows]
        state = h if step else self.input_norm(h)
        tokens = self._of(self.embeddings, step)(input_ids)  # [T, I]
        x = self._of(self.projs, step)(state) + self.spec.token_scale * tokens
        return F.gelu(self._of(self.norms, step)(x))

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Return the logits of stage `step` for y."""
        return self._of(self.heads, step)(y)  # type: ignore[no-any-return]

    def _of(self, modules: nn.ModuleList, step: int) -> nn.Module:
        return modules[min(step, len(modules) - 1)]  # if tied, the last one serves all further stages

    def weight_bytes_for(self, num_passes: int) -> int:
        """Bytes of weights that the first num_passes stages read, without the few rows of the embeddings."""
        parts = (self.projs, self.norms, self.heads)
        return sum(weight_bytes(*(self._of(part, step) for part in parts)) for step in range(num_passes))
