"""What an engine's target can do with logits, and the requests that it refuses for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.errors import RequestError
from trtspec.sampling_params import RequestSampling, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogitLimits:
    """What a target's launches do with logits other than draw from them.

    backend: its name. constraints: launches take LogitConstraints and return logits. logprobs: False if the engine's
    configuration rules out log-probabilities. most_biases: largest size of a request's logit_bias; None = any.
    most_bans: most ids at which a request with min_tokens may end; None = any.
    """

    backend: str
    constraints: bool = True
    logprobs: bool = True
    most_biases: int | None = None
    most_bans: int | None = None

    def check(self, params: SamplingParams, defaults: Mapping[str, Any], stop_ids: Collection[int] = ()) -> None:
        """Raise RequestError if a request asks for more.

        defaults: those of generation_config.json. stop_ids: all ids at which the request may end.
        """
        if not self.constraints:
            self._refuse_constraints(params, defaults)
        if not self.logprobs and params.logprobs is not None:
            raise RequestError(
                f"logprobs = {params.logprobs}: this engine speculates with disable_logprobs=True; leave logprobs "
                "unset, or make the engine without that"
            )
        biases = len(params.logit_bias or ())
        if self.most_biases is not None and biases > self.most_biases:
            raise RequestError(
                f"logit_bias names {biases} tokens, and backend {self.backend} takes {self.most_biases}; name fewer, "
                "or use structured_outputs to rule out many"
            )
        if self.most_bans is not None and params.min_tokens and len(stop_ids) > self.most_bans:
            raise RequestError(
                f"min_tokens = {params.min_tokens} holds back {len(stop_ids)} ids at which the text may end, and "
                f"backend {self.backend} takes {self.most_bans}; give fewer stop_token_ids, or set ignore_eos"
            )

    def without(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that the target can do, and warn of the others: no caller asked, so no request fails."""
        kept = dict(defaults)
        penalty = 1.0 if self.constraints else kept.pop("repetition_penalty", 1.0)
        if penalty != 1.0:
            logger.warning(
                "generation_config.json says repetition_penalty = %s, and this engine on backend %s was built to draw "
                "without: it does so; to have it, use the checkpoint itself or build the engine again",
                penalty,
                self.backend,
            )
        return kept

    def _refuse_constraints(self, params: SamplingParams, defaults: Mapping[str, Any]) -> None:
        wanted = RequestSampling.of(params, 0, 0, (), defaults).constraints
        for name in ("logprobs", "structured_outputs"):
            if getattr(params, name) is not None:
                wanted[name] = getattr(params, name)
        if wanted:
            asked = ", ".join(f"{name} = {value}" for name, value in wanted.items())
            raise RequestError(
                f"{asked}: this engine on backend {self.backend} was built to draw without; leave it at its neutral "
                "value, use the checkpoint itself, or build the engine again"
            )
