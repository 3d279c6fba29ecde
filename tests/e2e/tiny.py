"""Tiny models for whole-engine tests, random requests, and functions that run requests and record all that came out.

Vocabularies are tiny so that drafts are sometimes right and sometimes wrong. With random weights and a large vocabulary
a draft would never agree with the target, so rewinds would not be tested.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from tests.checkpoints import edit_config, make_checkpoint
from trtspec import LLM, SamplingParams
from trtspec.core import Proposal
from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.engine.step import Emission
from trtspec.outputs import SpeculationStats
from trtspec.protocols import DraftRequest

# Pieces of text of 1 to 2 characters: stop strings begin and end inside tokens. Id 0 ends a sequence.
PIECES = ("</s>", "a", "b", "c", "d", "e", "f", "g", "ab", "ca", " b", " ", "é", "gg", "\n", "dé")
VOCAB = len(PIECES)
EOS = 0
MASK = VOCAB - 1  # mask token of drafts that draft in parallel


def make_target(folder: Path, arch: str = "llama", name: str = "target", seed: int = 0, **overrides: object) -> Path:
    """Write a checkpoint of VOCAB ids with two layers of width 32. overrides: fields of the transformers config."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return make_checkpoint(folder, arch, name=name, seed=seed, **{**fields, **overrides})


def perturbed(
    target: Path, noise: float, folder: Path | None = None, seed: int = 1, name: str = "draft", **fields: Any
) -> Path:
    """Write a draft that often agrees with the target.

    Its weights are the target's, plus normal noise of `noise` times each tensor's own spread. It is written to
    `folder`/`name`; without `folder`, next to the target. fields: other fields of its config.json.
    """
    folder = (folder or target.parent) / name
    shutil.copytree(target, folder)
    edit_config(folder, **fields)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(target / "model.safetensors")
    for key, tensor in weights.items():
        if tensor.dim() > 1:
            weights[key] = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_tokenizer(folder: Path) -> None:
    """Write the tokenizer of PIECES into a folder.

    Text is the concatenation of the pieces. Prompts are tokenised character by character.
    """
    backend = tokenizers.Tokenizer(
        models.WordLevel({piece: token for token, piece in enumerate(PIECES)}, unk_token="a")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PIECES[EOS]])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """One request for a test to make."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Outcome:
    """All that a caller can see of one sample. Speculation must not change it."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None

    @classmethod
    def of(cls, request: Request) -> Outcome:
        text = "" if request.text is None else request.text.text
        return cls(request.output_ids, text, request.finish_reason, request.stop_reason)


@dataclass
class Run:
    """The outcomes, requests and steps of cases that were run together."""

    outcomes: list[Outcome]
    requests: list[Request]
    steps: list[list[Emission]] = field(default_factory=list)

    @property
    def speculation(self) -> SpeculationStats:
        return SpeculationStats.total(request.stats for request in self.requests)

    @property
    def num_mixed_steps(self) -> int:
        """Number of steps with both a context chunk that emits nothing and a generation with drafts."""
        return sum(
            any(not e.tokens for e in step) and any(e.tokens and e.draft_len for e in step) for step in self.steps
        )

    def cut_inside_draft(self) -> list[Request]:
        """Requests that an accepted draft ended, so that the rest of that step's tokens was dropped."""
        return [
            e.request for step in self.steps for e in step if e.request.finished and e.num_drafts == len(e.tokens) > 0
        ]


def motif_prompt(rng: random.Random, most: int = 80) -> list[int]:
    """1 to `most` ids, more often few than many. About half of them repeat a short motif, as code and tables do."""
    length = min(most, 1 + int(rng.expovariate(1 / 14))) if rng.random() < 0.95 else most
    if rng.random() < 0.5:
        return [rng.randrange(1, VOCAB) for _ in range(length)]
    motif = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6))]
    return (motif * length)[:length]


def draw_params(rng: random.Random, most_tokens: int = 24) -> SamplingParams:
    """Random parameters: greedy or sampled, with every filter and every way to stop, each with a seed of its own."""
    fields: dict[str, object] = {"temperature": 0.0} if rng.random() < 0.4 else {"temperature": rng.uniform(0.2, 1.2)}
    if rng.random() < 0.3:
        fields["top_k"] = rng.randint(1, 6)
    if rng.random() < 0.3:
        fields["top_p"] = rng.uniform(0.3, 0.95)
    if rng.random() < 0.2:
        fields["min_p"] = rng.uniform(0.02, 0.3)
    max_tokens = rng.randint(1, most_tokens)
    if rng.random() < 0.3:
        fields["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        fields["stop"] = [_stop_string(rng) for _ in range(rng.randint(1, 2))]
    return SamplingParams(
        **fields,
        seed=rng.randrange(2**64),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        ignore_eos=rng.random() < 0.4,
        include_stop_str_in_output=rng.random() < 0.5,
    )


def _stop_string(rng: random.Random) -> str:
    """2 or 3 characters that span the border of two pieces."""
    text = PIECES[rng.randrange(1, VOCAB)] + PIECES[rng.randrange(1, VOCAB)]
    return text[-3:] if rng.random() < 0.5 else text[:2]


def draw_cases(count: int, seed: int = 0, most_prompt: int = 80, most_tokens: int = 24) -> list[Case]:
    """`count` requests, the same for the same seed."""
    rng = random.Random(seed)
    return [Case(motif_prompt(rng, most_prompt), draw_params(rng, most_tokens)) for _ in range(count)]


def with_constraints(cases: Sequence[Case]) -> list[Case]:
    """The cases with constraints: two of three get penalties or biases, and about half get logprobs."""
    rng = random.Random(8)
    draws: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.uniform(0.8, 1.5),
        "presence_penalty": lambda: rng.uniform(-1, 1),
        "frequency_penalty": lambda: rng.uniform(-1, 1),
        "logit_bias": lambda: {rng.randrange(VOCAB): rng.uniform(-4, 4) for _ in range(rng.randint(1, 4))},
    }
    made = []
    for i, case in enumerate(cases):
        names = rng.sample(list(draws), rng.randint(1, 4) if i % 3 else 0)
        asked = {name: draws[name]() for name in names}
        asked["logprobs"] = rng.randint(0, 3) if rng.random() < 0.5 else None
        made.append(Case(case.prompt, dataclasses.replace(case.params, **asked)))
    return made


def run_alone(engine: EngineCore, cases: Sequence[Case]) -> list[Outcome]:
    """Run each case by itself, one after the other. Batching and speculation must reproduce these outcomes."""
    outcomes = []
    for case in cases:
        (request,) = engine.add_request(case.prompt, case.params)
        while not request.finished:
            engine.step()
        outcomes.append(Outcome.of(request))
    return outcomes


def run_together(
    engine: EngineCore,
    cases: Sequence[Case],
    seed: int = 0,
    after_step: Callable[[list[Emission]], None] = lambda emissions: None,
) -> Run:
    """Run all cases, a few arriving at a time between steps, so that prompts are prefilled while others generate."""
    rng = random.Random(seed)
    pending = list(cases)
    run = Run([], [])
    while pending or engine.has_work:
        for _ in range(min(len(pending), rng.choice((0, 0, 1, 2)))):
            case = pending.pop(0)
            run.requests += engine.add_request(case.prompt, case.params)
        if engine.has_work:
            run.steps.append(engine.step())
            after_step(run.steps[-1])
    run.outcomes = [Outcome.of(request) for request in run.requests]
    return run


def assert_all_blocks_free(llm: LLM) -> None:
    """Check that every KV block is back in the pool, and that the accounting agrees."""
    scheduler = llm.engine.loop.scheduler
    scheduler.allocator.check(scheduler.live())
    assert not list(scheduler.live())
    assert scheduler.allocator.num_free == scheduler.allocator.num_blocks - 1


class LyingOracle:
    """A user's drafter that knows the right continuation of request i.

    It lies about each token with probability `lie`.
    """

    def __init__(self, answers: Sequence[Sequence[int]], lie: float = 0.3, shorten: float = 0.0, seed: int = 0) -> None:
        """Keep the answers and probabilities.

        `answers[i]`: prompt and output of request i; past its end, drafts are random ids. `shorten`: probability of a
        draft of random length instead of the requested one.
        """
        self.answers = answers
        self.lie = lie
        self.shorten = shorten
        self.rng = random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        K = max(request.max_draft_len for request in requests)
        rows, lengths = [], []
        for request in requests:
            known = len(request.tokens)
            right = list(self.answers[request.request_id][known : known + K])
            right += [self.rng.randrange(VOCAB) for _ in range(K - len(right))]
            rows.append([self._told(token) for token in right])
            shorter = self.rng.random() < self.shorten
            lengths.append(self.rng.randint(0, request.max_draft_len) if shorter else request.max_draft_len)
        return Proposal(torch.tensor(rows), torch.tensor(lengths))

    def forget(self, request_id: int) -> None:
        """Do nothing: there is no state to drop."""

    def _told(self, token: int) -> int:
        return (token + self.rng.randrange(1, VOCAB)) % VOCAB if self.rng.random() < self.lie else token
