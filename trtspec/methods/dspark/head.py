"""The DSpark draft head: a DFlash block with a Markov head and a confidence head.

The Markov head, of low rank, reads the draft before and biases the logits U of a row. The confidence head guesses
acceptance. References: Cheng et al., "DSpark: confidence-scheduled speculative decoding with semi-autoregressive
generation", arXiv 2607.05147; deepseek-ai/DeepSpec deepspec/modeling/dspark; speculators/models/dspark.

For row j of the block, h_j = norm(row j) and U_j = lm_head(h_j), which methods/dflash/head.py explains. Draft
k = 1 .. K has the row r = k - 1 if rows guess the token after them (from_anchor), else r = k. x_0 is the block's first
token n, and e_k = W1[x_{k-1}]:

    vanilla  b_k = W2 e_k
    gated    b_k = W2 (sigmoid(Wg [h_r; e_k] + bg) * e_k)
    rnn      (g, c, o) = Wj [s; e_k; h_r] + bj;  b_k = W2 tanh(o);  s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
             s = 0 before row 0; row 0 updates s with e_1 even where it guesses nothing
    x_k is drawn from U_r + b_k;  its confidence is sigmoid(wc [h_r; e_k] + bc), or that of h_r alone

The confidence of x_k is a guess at the probability that x_k is accepted if the drafts before it are. It depends on no
drafts but these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtspec.methods.dflash.head import DFlashHead, DFlashSpec
from trtspec.models.attention import Attend
from trtspec.models.layers import Linear, _unloaded


@dataclass(frozen=True, kw_only=True)
class DSparkSpec(DFlashSpec):
    """The shape of a DSpark head. rank: width of the Markov head, 0 = none. markov: kind of the Markov head."""

    from_anchor: bool
    rank: int
    markov: str
    confidence: bool
    confidence_reads_markov: bool


class DSparkHead(DFlashHead):
    """A DFlash draft whose `forward` ends with the last norm, because all heads read the output of that."""

    spec: DSparkSpec

    def __init__(self, spec: DSparkSpec, first_layer: int = 0, max_position: int | None = None) -> None:
        super().__init__(spec, first_layer, max_position)
        H, R, V, Vd = spec.decoder.hidden_size, spec.rank, len(self.draft_ids), len(self.target_ids)
        self.markov: nn.ModuleDict = nn.ModuleDict()
        if R:
            self.markov["embedding"] = nn.Embedding(V, R, _weight=_unloaded(V, R))
            self.markov["bias"] = Linear(R, Vd, bias=False, float_out=True)
        if spec.markov == "gated":
            self.markov["gate"] = Linear(H + R, R, bias=True)
        if spec.markov == "rnn":
            self.markov["joint"] = Linear(2 * R + H, 3 * R, bias=True)
        if spec.confidence:
            self.confidence = Linear(H + R * spec.confidence_reads_markov, 1, bias=True, float_out=True)

    def forward(
        self,
        input_ids: Tensor,
        h: Tensor,
        positions: Tensor,
        attend: Attend,
        step: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return h [n, H] of the rows of blocks, after the last norm; arguments as for DFlashHead.forward."""
        return self.norm(super().forward(input_ids, h, positions, attend, step, rows))  # type: ignore[no-any-return]

    def logits(self, y: Tensor, step: int = 0) -> Tensor:
        """Logits U [R, Vd] fp32 of y [R, H], without a bias."""
        return self.head(y)  # type: ignore[no-any-return]

    def before(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Return e [n, R] of the drafts after tokens [n] int64, target ids; where R = 0 it has the dtype of `like`."""
        if not self.spec.rank:
            return like.new_empty(tokens.shape[0], 0)
        return self.markov["embedding"](tokens)  # type: ignore[no-any-return]

    def biased(self, base: Tensor, h: Tensor, e: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the biased logits [B, Vd] fp32 of a row, and the state of the next row.

        base: unbiased logits [B, Vd] fp32 of the row. h: [B, H] of the row. e: [B, R] of the token before it. state:
        [B, R].
        """
        kind = self.spec.markov
        if not kind:
            return base, state
        if kind == "gated":
            e = self.markov["gate"](torch.cat((h, e), dim=-1)).sigmoid() * e
        elif kind == "rnn":
            state, e = self._step(h, e, state)
        return base + self.markov["bias"](e), state

    def advanced(self, h: Tensor, e: Tensor, state: Tensor) -> Tensor:
        """Return the state after a row that guesses nothing."""
        return self._step(h, e, state)[0] if self.spec.markov == "rnn" else state

    def _step(self, h: Tensor, e: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run a row of rnn -> the state after it, and the input of W2, [B, R] each."""
        gate, candidate, out = self.markov["joint"](torch.cat((state, e, h), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), out.tanh()

    def confidences(self, h: Tensor, e: Tensor) -> Tensor:
        """Confidences [n] fp32, in (0, 1), of h [n, H] and e [n, R]."""
        read = torch.cat((h, e), dim=-1) if self.spec.confidence_reads_markov else h
        return self.confidence(read)[:, 0].sigmoid()  # type: ignore[no-any-return]
