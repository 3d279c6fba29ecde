"""Contestants, contests and which contestant runs in which contest, as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.checkpoints import Model

INPUT_LEN = 128
PREFILL_LEN = 1024
LIMITS = {"max_batch": 8, "max_len": 1280, "max_num_tokens": 2048}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
K_DRAFT = 3  # of the draft model and of EAGLE3

PEERS = ("vllm", "transformers", "llama")
LABELS = {"trtspec": "trtspec", "vllm": "vLLM", "transformers": "transformers", "llama": "llama.cpp"}
VLLM_MODES = ("own-processes", "in-process")  # where vLLM's engine core and worker run; the first is vLLM's default
WHAT = ("plain", "batch8", "prefill", "ngram", "draft", "eagle3", "startup")


@dataclass(frozen=True)
class Contest:
    """One figure of every contestant. With output_len 1 it is the time of the prefill."""

    name: str
    batch: int
    input_len: int
    output_len: int

    @property
    def is_prefill(self) -> bool:
        return self.output_len == 1


@dataclass(frozen=True)
class Contestant:
    """A peer in one configuration.

    format: that of the weights, bf16, int8 or int4; peers are compared within one format.
    """

    peer: str
    variant: str = ""
    format: str = "bf16"
    speculation: Mapping[str, Any] | None = field(default=None, hash=False)
    eager: bool = False  # trtspec without a compiled engine
    in_process: bool = False  # vLLM in one process
    max_batch: int = 8

    @property
    def name(self) -> str:
        return f"{LABELS[self.peer]} {self.variant}".strip()

    @property
    def is_reference(self) -> bool:
        """Whether the other contestants of its format are compared with it."""
        return self.peer == "trtspec" and not self.eager


@dataclass(frozen=True)
class Group:
    """Contestants that are loaded at the same time, and the contests that they run in turn."""

    name: str
    contests: tuple[Contest, ...]
    contestants: tuple[Contestant, ...]


def groups(
    model: Model, what: set[str], peers: set[str], output_len: int, vllm_modes: Collection[str] = VLLM_MODES
) -> list[Group]:
    """Groups for the part of `what` (names of WHAT) that makes sense for the model.

    peers: contestants besides trtspec. vllm_modes: the VLLM_MODES in which vLLM takes part.
    """
    wanted = {"decoding"} if what & {"plain", "batch8", "prefill", "startup"} else set()
    wanted |= what & {"ngram"}
    wanted |= {"draft"} if "draft" in what and model.draft else set()
    wanted |= {"eagle3"} if "eagle3" in what and model.eagle3 else set()
    plain = {
        "plain": Contest("plain, batch 1", 1, INPUT_LEN, output_len),
        "batch8": Contest("plain, batch 8", 8, INPUT_LEN, output_len),
        "prefill": Contest(f"prefill of {PREFILL_LEN} tokens", 1, PREFILL_LEN, 1),
    }
    found = []
    for name, (title, contestants) in _contestants(model).items():
        contests = [Contest(f"{title}, batch {batch}", batch, INPUT_LEN, output_len) for batch in (1, 8)]
        if name == "decoding":
            contests = [contest for key, contest in plain.items() if key in what]
        if name in wanted:
            chosen = [one for one in contestants if one.peer in {"trtspec", *peers}]
            chosen = [one for one in chosen if one.peer != "vllm" or VLLM_MODES[one.in_process] in vllm_modes]
            found.append(Group(name, tuple(contests), tuple(chosen)))
    return found


def _contestants(model: Model) -> dict[str, tuple[str, list[Contestant]]]:
    """Contestants by name of group, with the title of its contests."""
    K = NGRAM["num_speculative_tokens"]
    draft = {"method": "draft_model", "model": str(model.draft), "num_speculative_tokens": K_DRAFT}
    eagle3 = {"method": "eagle3", "model": str(model.eagle3), "num_speculative_tokens": K_DRAFT}
    return {
        "decoding": (
            "plain",
            [
                Contestant("trtspec"),
                Contestant("trtspec", "eager", eager=True),
                *_vllm(None),
                Contestant("transformers"),
                Contestant("llama", "BF16"),
                Contestant("trtspec", "int8", "int8"),
                Contestant("llama", "Q8_0", "int8"),
                Contestant("trtspec", "int4", "int4"),
                Contestant("llama", "Q4_0", "int4"),
            ],
        ),
        "ngram": (
            f"n-gram K={K}",
            [
                Contestant("trtspec", speculation=NGRAM),
                *_vllm(NGRAM),
                Contestant("transformers", "prompt lookup", speculation=NGRAM, max_batch=1),
                Contestant("llama", "BF16 lookup", speculation=NGRAM, max_batch=1),
            ],
        ),
        "draft": (
            f"draft model K={K_DRAFT}",
            [
                Contestant("trtspec", speculation=draft),
                *_vllm(draft),
                Contestant("transformers", "assisted", speculation=draft, max_batch=1),
            ],
        ),
        "eagle3": (
            f"EAGLE3 K={K_DRAFT}",
            [Contestant("trtspec", speculation=eagle3), *_vllm(eagle3)],
        ),
    }


def _vllm(speculation: Mapping[str, Any] | None) -> list[Contestant]:
    """vLLM in both of VLLM_MODES."""
    return [
        Contestant("vllm", speculation=speculation),
        Contestant("vllm", "in-process", speculation=speculation, in_process=True),
    ]
