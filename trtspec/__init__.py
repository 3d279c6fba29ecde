"""Speculative decoding for large language models: one loop, many ways to draft. See README.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.config.speculative import SpeculativeConfig
    from trtspec.engine.background import Generation
    from trtspec.llm import LLM
    from trtspec.modes import SpeculativeDecodingMode
    from trtspec.outputs import CompletionOutput, Logprob, OutputDelta, RequestOutput, SpeculationStats
    from trtspec.sampling_params import SamplingParams, StructuredOutputs

__all__ = [
    "LLM",
    "CompletionOutput",
    "Generation",
    "Logprob",
    "OutputDelta",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeDecodingMode",
    "StructuredOutputs",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "Generation": "engine.background",
    **dict.fromkeys(("SamplingParams", "StructuredOutputs"), "sampling_params"),
    "SpeculativeConfig": "config.speculative",
    "SpeculativeDecodingMode": "modes",
    **dict.fromkeys(("CompletionOutput", "Logprob", "OutputDelta", "RequestOutput", "SpeculationStats"), "outputs"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Importing torch takes seconds, and the server's front, which runs no model, does without torch.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'trtspec' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"trtspec.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
