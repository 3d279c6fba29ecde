"""Log-probabilities of a request's tokens, from the logits that each token was drawn from.

They are those of the model's own distribution, before penalties, temperature and filters (vLLM's raw_logprobs). Each
row is computed by itself, so that the bits do not depend on the other rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trtspec.outputs import Logprob
from trtspec.text import Tokenizer


@dataclass(slots=True)
class LogprobRecord:
    """Log-probabilities of one sample: a dict for each of its tokens. tokenizer: None where ids have no text."""

    num_top: int
    tokenizer: Tokenizer | None
    entries: list[dict[int, Logprob]] = field(default_factory=list)

    @property
    def cumulative(self) -> float:
        """Log-probability of the whole output. The first entry of a token's dict is the token itself."""
        return sum(next(iter(entry.values())).logprob for entry in self.entries)

    def read(self, logits: Tensor, tokens: Sequence[int]) -> list[dict[int, Logprob]]:
        """Return the entries of n tokens, which are not stored here. logits: [>= n, V] fp32, a row for each token."""
        return [self._entry(row, token) for row, token in zip(logits, tokens, strict=False)]

    def _entry(self, logits: Tensor, token: int) -> dict[int, Logprob]:
        """The entry of a token: itself first, then the most likely tokens in order. logits: [V] fp32."""
        logprobs = logits.float().log_softmax(-1)
        own = logprobs[token]
        entry = {token: self._named(token, own.item(), int((logprobs >= own).sum()))}
        if self.num_top:
            values, ids = logprobs.topk(min(self.num_top, len(logprobs)))
            for rank, (value, id_) in enumerate(zip(values.tolist(), ids.tolist(), strict=True), start=1):
                entry.setdefault(id_, self._named(id_, value, rank))
        return entry

    def _named(self, token: int, logprob: float, rank: int) -> Logprob:
        text = None if self.tokenizer is None else self.tokenizer.token_bytes(token).decode(errors="replace")
        return Logprob(logprob, rank, text)
