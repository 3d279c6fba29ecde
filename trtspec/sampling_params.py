"""Sampling parameters that a caller may set, and the same with every default filled in."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from json import dumps
from typing import Any, cast

from trtspec.errors import RequestError

NEVER = 2**62
"""A token index that no sequence reaches: `ban_until` of ids that are banned for ever."""

MOST_NESTED = 64
"""Most levels of brackets in a JSON schema. A deeper one takes much longer to compile."""

MOST_LOGPROBS = 20
"""Largest number of most likely tokens that a request may ask for, next to each token drawn."""

MOST_STOP_CHARACTERS = 1024
"""Most characters of a stop string. Text that may begin one is held back, and compared with it for each token."""

LEAST_TEMPERATURE = 1e-6
"""Lower ones, but 0, count as this one: logits would be divided to infinity."""

_LARGEST = 2**31 - 1  # of a top_k, which the kernels have as int32, and of a number of tokens


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The required form of a text. Exactly one field is set; the names are vLLM's.

    json: JSON of a schema, given as a dict or its text. json_object: any JSON object. regex: a regular expression that
    the whole text matches. choice: one of some strings. grammar: a sentence of a grammar in EBNF, whose root is `root`.
    RequestError for anything else. An error inside a field shows when a request is made with it.
    """

    json: Mapping[str, Any] | str | None = field(default=None, hash=False)
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            try:
                object.__setattr__(self, "json", dumps(self.json))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"structured_outputs: the schema is no JSON ({error}); give plain values") from error
        if isinstance(self.json, str) and _nesting(self.json) > MOST_NESTED:
            raise RequestError(f"structured_outputs: the schema is nested deeper than {MOST_NESTED} levels; flatten it")
        if self.choice is not None and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or any(not isinstance(one, str) or not one for one in self.choice):
                raise RequestError(f"structured_outputs: choice = {self.choice!r:.80} must be non-empty strings")
        elif self.choice is not None:
            raise RequestError(f"structured_outputs: choice = {self.choice!r:.80} must be a list of strings")
        for name in ("json", "regex", "grammar"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise RequestError(f"structured_outputs: {name} = {getattr(self, name)!r:.80} must be text")
        given = [name for name in ("json", "json_object", "regex", "choice", "grammar") if getattr(self, name)]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs takes exactly one of json, json_object, regex, choice and grammar; this has "
                f"{' and '.join(given) or 'none'}"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of drawing one request's tokens. RequestError names the bad field, its value and the allowed range.

    temperature, top_k, top_p, min_p: None = the checkpoint's generation_config.json, else 1.0 / off / off / off.
    temperature 0 is greedy. top_k 0 or -1 = off. seed: None or -1 = drawn by the engine and returned with the output.
    max_tokens: None = up to the engine's max_seq_len. min_tokens: number of output tokens before which end-of-sequence
    and stop token ids cannot be drawn. stop: strings that end the text, of MOST_STOP_CHARACTERS at most. They are not
    part of it, unless include_stop_str_in_output is set. n: samples per prompt; sample 0 uses the seed itself, sample i
    a hash of it.

    logit_bias: token id -> value added to its logit, -100..100; penalties apply to the sum.
    repetition_penalty: a positive logit of a token in prompt or output is divided by it, any other multiplied by it.
    None = the checkpoint's, else 1.0 = off.
    presence_penalty is subtracted from the logit of each token in the output, frequency_penalty once for each time that
    the token is there. Both are in [-2, 2], 0 = off.
    logprobs: 0..20, number of most likely tokens whose log-probabilities are returned, next to that of each token
    drawn; None = none.
    max_draft_len: largest number of drafts per step, or depth of a draft tree. 0 = plain decoding, None = the engine's
    K, which no request exceeds. It changes the time of a request, and no token.

    structured_outputs: the required form of the text. End-of-sequence and stop token ids can then be drawn where the
    text may end, and no other id where it must end. min_tokens and ignore_eos contradict that, and are refused with it.
    """

    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: int | None = None
    max_draft_len: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        given: Any = () if self.stop is None else self.stop  # vLLM takes None
        object.__setattr__(self, "stop", (given,) if isinstance(given, str) else _tuple("stop", given))
        ids: Any = () if self.stop_token_ids is None else self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", ids))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        _int("n", self.n, 1)
        optional: tuple[tuple[str, Callable[[float], bool], str], ...] = (
            ("temperature", lambda x: x >= 0, ">= 0 (0 = greedy)"),
            ("top_p", lambda x: 0 < x <= 1, "in (0, 1] (1 = off)"),
            ("min_p", lambda x: 0 <= x <= 1, "in [0, 1] (0 = off)"),
            ("repetition_penalty", lambda x: x > 0, "> 0 (1 = off)"),
        )
        for name, allowed, words in optional:
            if getattr(self, name) is not None:
                _real(name, getattr(self, name), allowed, words)
        if self.top_k is not None:
            _int("top_k", self.top_k, -1, _LARGEST)
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 1)
        _int("min_tokens", self.min_tokens, 0, _LARGEST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}; raise max_tokens or lower it"
            )
        if self.seed is not None:
            _int("seed", self.seed, -(2**63))
            if self.seed >= 2**64:
                raise RequestError(f"seed = {self.seed} does not fit 64 bits; use a seed below 2**64")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop = {self.stop!r} must be non-empty strings")
        if (longest := max(map(len, self.stop), default=0)) > MOST_STOP_CHARACTERS:
            raise RequestError(f"a stop string has {longest} characters; use {MOST_STOP_CHARACTERS} at most")
        for token in self.stop_token_ids:
            _int("stop_token_ids", token, 0)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: leave detokenize on, or use stop_token_ids")
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), lambda x: -2 <= x <= 2, "in [-2, 2] (0 = off)")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.logprobs is not None:
            _int("logprobs", self.logprobs, 0)
            if self.logprobs > MOST_LOGPROBS:
                raise RequestError(f"logprobs = {self.logprobs} exceeds {MOST_LOGPROBS}; ask for fewer")
        if self.max_draft_len is not None:
            _int("max_draft_len", self.max_draft_len, 0)
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise RequestError(f"structured_outputs = {self.structured_outputs!r:.80} must be a StructuredOutputs")
            if self.min_tokens or self.ignore_eos:
                raise RequestError(
                    "structured_outputs says where the text ends; leave min_tokens and ignore_eos at their defaults"
                )

    @classmethod
    def tensorrt_llm(cls, **fields: Any) -> SamplingParams:
        """The meaning of a TensorRT-LLM request's parameters.

        It is greedy if temperature, top_k and top_p are all unset, if temperature is 0, if top_p is 0 or less, or if
        top_k is 1. Otherwise an unset field is 1.0, or off: generation_config.json is not used.
        """
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        given = {name: value for name, value in fields.items() if value is not None or name not in off}
        greedy = given.keys().isdisjoint(("temperature", "top_k", "top_p"))
        if isinstance(given.get("top_p"), (int, float)) and given["top_p"] <= 0:
            greedy = True
            del given["top_p"]
        params = cls(**{**off, **given})
        if greedy or params.top_k == 1 or params.temperature == 0:
            return replace(params, temperature=0.0, top_k=0, top_p=1.0)
        return params


@dataclass(frozen=True)
class RequestSampling:
    """All sampling parameters of one sample, resolved. `ban_ids` cannot be drawn at token indices below `ban_until`."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    ban_ids: tuple[int, ...] = ()
    ban_until: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_penalised(self) -> bool:
        """Whether the tokens so far change its logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def constraints(self) -> dict[str, object]:
        """Fields of SamplingParams that become core.LogitConstraints, with their values; neutral ones are left out."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
        return {name: getattr(self, name) for name, off in neutral.items() if getattr(self, name) != off}

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        seed: int,
        prompt_len: int,
        stop_ids: Iterable[int],
        defaults: Mapping[str, float | int],
    ) -> RequestSampling:
        """Resolve `params`. defaults: the checkpoint's generation_config. stop_ids: ids that min_tokens holds back."""

        def value(name: str, otherwise: float) -> float:
            own = getattr(params, name)
            return float(defaults.get(name, otherwise) if own is None else own)

        temperature = value("temperature", 1.0)
        return cls(
            greedy=temperature == 0,
            temperature=max(temperature, LEAST_TEMPERATURE) if temperature else 0.0,
            top_k=max(int(value("top_k", 0)), 0),
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            seed=seed,
            ban_ids=tuple(sorted(stop_ids)) if params.min_tokens else (),
            ban_until=prompt_len + params.min_tokens,
            repetition_penalty=value("repetition_penalty", 1.0),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        )


def _int(name: str, value: object, least: int, largest: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} = {value!r} must be an integer >= {least}")
    if value > largest:
        raise RequestError(f"{name} = {value!r} must be an integer <= {largest}")


def _real(name: str, value: object, allowed: Callable[[float], bool], words: str) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    if not number or not allowed(cast("float", value)):
        raise RequestError(f"{name} = {value!r} must be {words}")


def _tuple(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} = {values!r} must be a list")
    return tuple(values)


def _nesting(text: str) -> int:
    """Largest depth of nested brackets in a JSON text. Brackets in its strings do not count."""
    # A string that is never closed counts, too. Otherwise the search would start again at each quote inside it.
    outside = re.sub(r'"(\\.|[^"\\])*"?', "", text, flags=re.DOTALL)
    return max(accumulate(1 if char in "{[" else -1 if char in "}]" else 0 for char in outside), default=0)


def _checked_bias(bias: Mapping[int, float] | None) -> Mapping[int, float] | None:
    """A copy of the bias. RequestError if it is not valid."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias = {bias!r:.80} must be a mapping from token ids to numbers")
    for token, value in bias.items():
        _int("logit_bias: token id", token, 0)
        _real(f"logit_bias of token {token}", value, lambda x: -100 <= x <= 100, "in [-100, 100]")
    return dict(bias)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request, as a signed 64-bit number: the seed itself, or SplitMix64 of both."""
    if index == 0:
        mixed = seed % 2**64
    else:
        mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed
