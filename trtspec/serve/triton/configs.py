"""The models of both Triton layouts: their tensors with TensorRT-LLM's names, and the config.pbtxt of each model.

Names, types and shapes are those of TensorRT-LLM's triton_backend/all_models (llmapi and inflight_batcher_llm).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    dims: shape for one request, -1 = any. If a model has a batch dimension, it is 1 and comes before `dims`.
    refused: what to do instead of sending an input that we know and cannot serve; None = served. neutral: values of a
    refused input that ask for nothing, so that clients which always send this input are served.
    """

    name: str
    dtype: str  # Triton's: STRING, INT32, ...
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    refused: str | None = None
    neutral: tuple[float | str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A model of a repository. python_class: dotted path of the class that its model.py exports; "" for an ensemble."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    python_class: str = ""
    max_batch_size: int = 0
    decoupled: bool = True
    steps: tuple[EnsembleStep, ...] = ()


@dataclass(frozen=True)
class EnsembleStep:
    """A model of an ensemble. Pairs: (its tensor, the ensemble's tensor, which is internal if it begins with _)."""

    model: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


def required(name: str, dtype: str, dims: tuple[int, ...] = (1,)) -> TensorSpec:
    return TensorSpec(name, dtype, dims, optional=False)


ONE_SAMPLE = "one request is one sample here; send several requests with different seeds"
NO_BEAMS = "beam search is not built; leave it out, or sample with a temperature"
NO_LOGITS = "logits are not handed out; leave it out"
NO_BAD_WORDS = "forbidden words are not built; leave it out"
NO_BIAS = "logit bias by words is not built for Triton; leave it out"
NO_DRAFTS = "drafts come from the engine's own speculation; leave it out"

METRICS = (
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
)

# Outputs of the classic layout, in responses to requests that set return_log_probs.
_LOGPROBS = (
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
)

_LLMAPI = ModelSpec(
    "tensorrt_llm",
    inputs=(
        required("text_input", "STRING", (-1,)),
        TensorSpec("streaming", "BOOL"),
        TensorSpec("stop", "BOOL"),
        TensorSpec("sampling_param_best_of", "INT32", refused=ONE_SAMPLE, neutral=(1,)),
        TensorSpec("sampling_param_temperature", "FP32"),
        TensorSpec("sampling_param_top_k", "INT32"),
        TensorSpec("sampling_param_top_p", "FP32"),
        TensorSpec("sampling_param_frequency_penalty", "FP32"),
        TensorSpec("sampling_param_presence_penalty", "FP32"),
        TensorSpec("sampling_param_max_tokens", "INT32"),
        TensorSpec("sampling_param_stop", "STRING", (-1,)),
        TensorSpec("sampling_param_seed", "UINT64"),
        TensorSpec("sampling_param_exclude_input_from_output", "BOOL"),
        TensorSpec("return_finish_reason", "BOOL"),
        TensorSpec("return_stop_reason", "BOOL"),
        TensorSpec("return_cumulative_logprob", "BOOL"),
    ),
    outputs=(
        TensorSpec("text_output", "STRING", (-1,)),
        TensorSpec("finish_reason", "STRING", (-1,)),
        TensorSpec("stop_reason", "STRING", (-1,)),
        TensorSpec("cumulative_logprob", "FP32", (-1,)),
        *METRICS,
    ),
    python_class="trtspec.serve.triton.backend.LlmApiModel",
)

# Inputs that the ensemble and the BLS model take and pass on under the same name.
_SAMPLING = (
    TensorSpec("temperature", "FP32"),
    TensorSpec("repetition_penalty", "FP32"),
    TensorSpec("presence_penalty", "FP32"),
    TensorSpec("frequency_penalty", "FP32"),
    TensorSpec("min_tokens", "INT32"),
    TensorSpec("seed", "UINT64"),
    TensorSpec("end_id", "INT32"),
    TensorSpec("pad_id", "INT32"),
    TensorSpec("exclude_input_in_output", "BOOL"),
    TensorSpec("num_return_sequences", "INT32", refused=ONE_SAMPLE, neutral=(1,)),
    TensorSpec("beam_width", "INT32", refused=NO_BEAMS, neutral=(1,)),
    TensorSpec("return_log_probs", "BOOL"),
    TensorSpec("return_context_logits", "BOOL", refused=NO_LOGITS, neutral=(0,)),
    TensorSpec("return_generation_logits", "BOOL", refused=NO_LOGITS, neutral=(0,)),
)

_CLASSIC_ENGINE = ModelSpec(
    "tensorrt_llm",
    inputs=(
        required("input_ids", "INT32", (-1,)),
        required("input_lengths", "INT32"),
        required("request_output_len", "INT32"),
        *_SAMPLING,
        TensorSpec("runtime_top_k", "INT32"),
        TensorSpec("runtime_top_p", "FP32"),
        TensorSpec("len_penalty", "FP32", refused=NO_BEAMS, neutral=(0.0, 1.0)),
        TensorSpec("stop_words_list", "INT32", (2, -1)),
        TensorSpec("bad_words_list", "INT32", (2, -1), refused=NO_BAD_WORDS, neutral=(0, -1)),
        TensorSpec("embedding_bias", "FP32", (-1,), refused=NO_BIAS, neutral=(0.0,)),
        TensorSpec("draft_input_ids", "INT32", (-1,), refused=NO_DRAFTS),
        TensorSpec("draft_logits", "FP32", (-1, -1), refused=NO_DRAFTS),
        TensorSpec("draft_acceptance_threshold", "FP32", refused=NO_DRAFTS),
        TensorSpec("stop", "BOOL"),
        TensorSpec("streaming", "BOOL"),
    ),
    outputs=(
        TensorSpec("output_ids", "INT32", (-1, -1)),
        TensorSpec("sequence_length", "INT32", (-1,)),
        # Not in TensorRT-LLM: the ids of one step do not determine its text (half characters, start of a stop word).
        TensorSpec("text_output", "STRING", (-1,)),
        *_LOGPROBS,
        *METRICS,
    ),
    python_class="trtspec.serve.triton.classic.EngineModel",
    max_batch_size=1,
)

_PREPROCESSING = ModelSpec(
    "preprocessing",
    inputs=(
        required("QUERY", "STRING"),
        required("REQUEST_OUTPUT_LEN", "INT32"),
        TensorSpec("STOP_WORDS_DICT", "STRING", (-1,)),
        TensorSpec("BAD_WORDS_DICT", "STRING", (-1,), refused=NO_BAD_WORDS, neutral=("",)),
        TensorSpec("EMBEDDING_BIAS_WORDS", "STRING", (-1,), refused=NO_BIAS, neutral=("",)),
        TensorSpec("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), refused=NO_BIAS, neutral=(0.0,)),
    ),
    outputs=(
        TensorSpec("INPUT_ID", "INT32", (-1,)),
        TensorSpec("REQUEST_INPUT_LEN", "INT32"),
        TensorSpec("REQUEST_OUTPUT_LEN", "INT32"),
        TensorSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
    ),
    python_class="trtspec.serve.triton.classic.Preprocessing",
    max_batch_size=1,
    decoupled=False,
)

_POSTPROCESSING = ModelSpec(
    "postprocessing",
    inputs=(
        required("TOKENS_BATCH", "INT32", (-1, -1)),
        required("SEQUENCE_LENGTH", "INT32", (-1,)),
        TensorSpec("TEXT", "STRING", (-1,)),  # not in TensorRT-LLM; takes text_output of tensorrt_llm
    ),
    outputs=(TensorSpec("OUTPUT", "STRING", (-1,)),),
    python_class="trtspec.serve.triton.classic.Postprocessing",
    max_batch_size=1,
    decoupled=False,
)

_WHOLE_INPUTS = (
    required("text_input", "STRING"),
    required("max_tokens", "INT32"),
    TensorSpec("stop_words", "STRING", (-1,)),
    TensorSpec("bad_words", "STRING", (-1,)),
    TensorSpec("embedding_bias_words", "STRING", (-1,)),
    TensorSpec("embedding_bias_weights", "FP32", (-1,)),
    TensorSpec("top_k", "INT32"),
    TensorSpec("top_p", "FP32"),
    TensorSpec("length_penalty", "FP32"),
    TensorSpec("stream", "BOOL"),
    *_SAMPLING,
)
_WHOLE_OUTPUTS = (TensorSpec("text_output", "STRING", (-1,)), *_LOGPROBS, *METRICS)

TO_PREPROCESSING = (
    ("QUERY", "text_input"),
    ("REQUEST_OUTPUT_LEN", "max_tokens"),
    ("STOP_WORDS_DICT", "stop_words"),
    ("BAD_WORDS_DICT", "bad_words"),
    ("EMBEDDING_BIAS_WORDS", "embedding_bias_words"),
    ("EMBEDDING_BIAS_WEIGHTS", "embedding_bias_weights"),
)
FROM_PREPROCESSING = (
    ("input_ids", "INPUT_ID"),
    ("input_lengths", "REQUEST_INPUT_LEN"),
    ("request_output_len", "REQUEST_OUTPUT_LEN"),
    ("stop_words_list", "STOP_WORDS_IDS"),
)
TO_ENGINE = (
    ("runtime_top_k", "top_k"),
    ("runtime_top_p", "top_p"),
    ("len_penalty", "length_penalty"),
    ("streaming", "stream"),
    *((spec.name, spec.name) for spec in _SAMPLING),
)

_ENSEMBLE = ModelSpec(
    "ensemble",
    inputs=_WHOLE_INPUTS,
    outputs=_WHOLE_OUTPUTS,
    max_batch_size=1,
    steps=(
        EnsembleStep("preprocessing", TO_PREPROCESSING, tuple((own, f"_{own}") for _, own in FROM_PREPROCESSING)),
        EnsembleStep(
            "tensorrt_llm",
            (*((theirs, f"_{own}") for theirs, own in FROM_PREPROCESSING), *TO_ENGINE),
            (
                ("output_ids", "_TOKENS_BATCH"),
                ("sequence_length", "_SEQUENCE_LENGTH"),
                ("text_output", "_TEXT"),
                *((spec.name, spec.name) for spec in (*_LOGPROBS, *METRICS)),
            ),
        ),
        EnsembleStep(
            "postprocessing",
            (("TOKENS_BATCH", "_TOKENS_BATCH"), ("SEQUENCE_LENGTH", "_SEQUENCE_LENGTH"), ("TEXT", "_TEXT")),
            (("OUTPUT", "text_output"),),
        ),
    ),
)

_BLS = ModelSpec(
    "tensorrt_llm_bls",
    inputs=_WHOLE_INPUTS,
    outputs=_WHOLE_OUTPUTS,
    python_class="trtspec.serve.triton.classic.BlsModel",
    max_batch_size=1,
)

LAYOUTS: dict[str, tuple[ModelSpec, ...]] = {
    "llmapi": (_LLMAPI,),
    "classic": (_PREPROCESSING, _CLASSIC_ENGINE, _POSTPROCESSING, _ENSEMBLE, _BLS),
}


def config_text(model: ModelSpec, streaming: bool, parameters: Mapping[str, str]) -> str:
    """The config.pbtxt of a model: a ModelConfig in protobuf's text format.

    streaming: whether a request may get several responses. Triton calls such a model decoupled, and does not allow
    calls that return one response to use it.
    """
    lines = [f'name: "{model.name}"', f"max_batch_size: {model.max_batch_size}"]
    if model.steps:
        lines.append('platform: "ensemble"')
    else:
        lines.append('backend: "python"')
        lines += _block("instance_group", ["count: 1", "kind: KIND_CPU"])  # the model itself selects its device
        lines += _block("model_transaction_policy", [f"decoupled: {str(model.decoupled and streaming).lower()}"])
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            lines += _block(kind, _tensor(tensor, kind))
    for key, value in parameters.items():
        lines += _block("parameters", [f"key: {_quoted(key)}", f"value {{ string_value: {_quoted(value)} }}"])
    if model.steps:
        lines += _block("ensemble_scheduling", [line for step in model.steps for line in _step(step)])
    return "\n".join(lines) + "\n"


def _tensor(tensor: TensorSpec, kind: str) -> list[str]:
    lines = [
        f'name: "{tensor.name}"',
        f"data_type: TYPE_{tensor.dtype}",
        f"dims: [ {', '.join(map(str, tensor.dims))} ]",
    ]
    return [*lines, "optional: true"] if kind == "input" and tensor.optional else lines


def _step(step: EnsembleStep) -> list[str]:
    lines = [f'model_name: "{step.model}"', "model_version: -1"]
    for kind, pairs in (("input_map", step.inputs), ("output_map", step.outputs)):
        for key, value in pairs:
            lines.append(f'{kind} {{ key: "{key}" value: "{value}" }}')
    return _block("step", lines)


def _block(name: str, lines: Iterable[str]) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]


def _quoted(text: str) -> str:
    """A string in protobuf's text format. Its escapes are those of JSON for all characters that a path may hold."""
    return json.dumps(text, ensure_ascii=False)
