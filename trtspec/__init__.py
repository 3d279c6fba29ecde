"""Speculative decoding for large language models: one loop, many ways to draft. See README.md."""

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
