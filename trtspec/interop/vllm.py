"""SpeculativeConfig -> the object that vLLM's --speculative-config takes.

The field names are those of vLLM 0.32. It refuses unknown names, so fields that earlier versions had are not written.
"""

from __future__ import annotations

import json
from typing import Any

from trtspec.config.engine import QUANTIZATIONS
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.config.tree import chain, parse_tree
from trtspec.errors import ConfigError
from trtspec.interop.field_mapper import FieldMapper, FieldWarning, draft_len_steps

SERVER = "vLLM"

# Methods that vLLM does not take -> the nearest that it does.
_NEAREST = {
    "auto": "method='ngram' with num_speculative_tokens=5 (3 for more than 4 requests) and prompt_lookup_min=1",
    "custom_class": "vLLM's own custom_class, which takes the import path of a vLLM proposer as model: a drafter "
    "written for trtspec.protocols.Drafter does not run there; from a file, method='ngram'",
    "grammar": "method='ngram', which drafts from the prompt and the text so far",
    "mlp_speculator": "method='medusa' or 'eagle3': vLLM knows the name, but has nothing that runs it",
}
# Method -> (field of the draft's config.json with the layers that it reads, offset of its ids from "after layer i").
_LAYERS = {
    "eagle3": ("eagle_aux_hidden_state_layer_ids", 1),
    "dflash": ("dflash_config.target_layer_ids", 0),
    "dspark": ("aux_hidden_state_layer_ids", 1),
}
# Text that vLLM looks for in the path of a model, in its order -> the method that it then runs.
_HINTS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_SAME = (
    "revision",
    "code_revision",
    "enforce_eager",
    "draft_tensor_parallel_size",
    "disable_padded_drafter_batch",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "draft_sample_method",
    "use_heterogeneous_vocab",
    "parallel_drafting",
)


def to_vllm(config: SpeculativeConfig, draft: DraftInfo | None = None) -> tuple[dict[str, Any], list[FieldWarning]]:
    """Return (the JSON object, a warning for each field that is different in vLLM).

    draft: what is known of the draft checkpoint. Raises UnsupportedError for a method that vLLM does not have, and
    names the nearest. Raises ConfigError for what contradicts itself, or lacks something that vLLM needs.
    """
    fields = FieldMapper(config, draft)
    if fields.method in _NEAREST:
        raise fields.refuse(SERVER, _NEAREST[fields.method])
    settings: dict[str, Any] = {"method": fields.method}
    if fields.model is not None:
        settings["model"] = fields.model
        _warn_of_hints(fields, fields.model)
    if fields.method == "extract_hidden_states":
        settings.update(_hidden_states(fields))
    else:
        settings.update(_draft_len(fields))
    settings.update(fields.read_plain(*_SAME))
    settings.update(_acceptance(fields))
    settings.update(_draft_model(fields))
    _chain_only(fields)
    fields.warn_if_set("prompt_lookup_latest", "vLLM copies what followed the earliest match")
    fields.warn_if_set("disable_logprobs", "not written: vLLM returns logprobs whenever a request asks for them")
    if fields.has_both_engines():
        fields.warn_if_set("one_engine", "vLLM has one way to run it: draft passes after the target's, in its process")
    else:
        fields.read("one_engine")  # there was nothing to choose
    fields.warn_if_set("vanilla", "vLLM runs as many MTP layers as the checkpoint has")
    return settings, fields.close(SERVER)


def _warn_of_hints(fields: FieldMapper, model: str) -> None:
    """Warn of a name in the model's path that vLLM prefers to the method.

    In vLLM such a name wins over all methods but those of the same kind.
    """
    hint = next((hint for hint in _HINTS if hint in model.lower()), None)
    if hint is not None and fields.method not in _HINTS.values():
        fields.warn("model", f"vLLM finds {hint!r} in it and runs method={_HINTS[hint]!r}; rename the folder")


def _draft_len(fields: FieldMapper) -> dict[str, Any]:
    """Settings of K, and of K by batch size."""
    # suffix drafts as far as its tree goes
    unset = fields.method == "suffix" and not fields.is_set("num_speculative_tokens")
    k = fields.read("num_speculative_tokens") if unset else fields.draft_len(SERVER)
    settings = {} if k is None else {"num_speculative_tokens": k}
    gates = fields.gates()
    if not gates:
        return settings
    if gates == ("num_speculative_tokens_per_batch_size",):
        return {**settings, **fields.read_plain(*gates)}
    if k is None:
        fields.warn_gates(gates, "it depends on num_speculative_tokens, which is not set")
        return settings
    if "max_concurrency" in gates:
        fields.warn(
            "max_concurrency",
            "written as num_speculative_tokens_per_batch_size, which counts the requests that run, also where "
            "max_num_tokens holds fewer",
        )
    steps = draft_len_steps(fields.config, k)
    return settings if steps == [(None, k)] else {**settings, "num_speculative_tokens_per_batch_size": _ranges(steps)}


def _ranges(steps: list[tuple[int | None, int]]) -> list[list[int]]:
    """Inclusive ranges [first batch size, last batch size, K]. K of the last range also holds after its end."""
    ranges, start = [], 1
    for size, length in steps:
        ranges.append([start, start if size is None else size, length])
        start = ranges[-1][1] + 1
    return ranges


def _hidden_states(fields: FieldMapper) -> dict[str, Any]:
    """Settings of the layers, by vLLM's ids. The folder of the files is a separate setting in vLLM."""
    layers = fields.read("capture_layers")
    ids = to_vllm_layers(tuple(i for i in layers or () if i >= 0))
    if not ids:
        raise ConfigError(
            f"capture_layers={layers} with method='extract_hidden_states': vLLM needs the layers to save, and saves "
            "none after the final norm; set it (EAGLE3's for n layers: (1, n//2 - 1, n - 4))"
        )
    if -1 in layers:
        fields.warn("capture_layers", "-1 is left out: vLLM saves residual streams, none after the final norm")
    if fields.read("num_speculative_tokens") not in (None, 1):
        fields.warn("num_speculative_tokens", "written as 1, which vLLM demands here; nothing is drafted either way")
    for field in fields.gates():
        fields.warn(field, "not written: nothing is drafted")
    folder = fields.read("output_directory")
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    fields.warn(
        "output_directory",
        f"no speculative setting there: add --kv-transfer-config '{json.dumps(transfer)}'; its files are of vLLM's "
        "own layout",
    )
    fields.warn_if_set("write_interval", "vLLM writes one file per request")
    fields.warn_if_set("file_prefix", "vLLM names files by the request's id")
    return {
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }


def to_vllm_layers(layers: tuple[int, ...]) -> list[int]:
    """vLLM's ids of the layers: "after layer i" is "entering layer i + 1" there."""
    return [i + 1 for i in layers]


def _acceptance(fields: FieldMapper) -> dict[str, Any]:
    method = fields.read("rejection_sample_method")
    settings: dict[str, Any] = {}
    if fields.method == "extract_hidden_states":
        fields.warn_if_set("rejection_sample_method", "nothing is drafted, so nothing is accepted or rejected")
    elif method in (None, "strict"):
        fields.warn(
            "rejection_sample_method",
            "vLLM accepts by rejection sampling: greedy output is the same, sampled output has the same distribution "
            "but not the tokens of plain decoding (set 'standard' to ask for that)",
            "strict",
        )
    else:
        settings["rejection_sample_method"] = method
    if fields.has_draft and fields.read("draft_sample_method") is None:
        fields.warn(
            "draft_sample_method",
            "vLLM drafts the most likely tokens, which sampled requests accept less often than tokens drawn with the "
            "target's noise (set 'greedy' to ask for that, or 'probabilistic')",
        )
    if fields.method == "dspark":
        settings.update(fields.read_plain("enable_adaptive_verification"))
    else:
        fields.warn_if_set("enable_adaptive_verification", "not written: vLLM has it for method='dspark' only")
    fields.warn_if_set("acceptance_window", "not written: vLLM goes on speculating however little is accepted")
    fields.warn_if_set("acceptance_length_threshold", "not written: see acceptance_window")
    return settings


def _draft_model(fields: FieldMapper) -> dict[str, Any]:
    """Settings of the draft's checkpoint: quantization, context, captured layers."""
    settings: dict[str, Any] = {}
    quantization = fields.read("quantization")
    if quantization in QUANTIZATIONS:
        fields.warn_if_set(
            "quantization", "not written: vLLM takes a checkpoint as it is, and would look for one of its own kinds"
        )
    else:
        settings["quantization"] = quantization
    if fields.has_draft:
        settings.update(fields.read_plain("max_model_len"))
    else:
        fields.warn_if_set("max_model_len", "not written: vLLM limits draft models by it; this drafts to the target's")
    _warn_of_layers(fields)
    return settings


def _warn_of_layers(fields: FieldMapper) -> None:
    """Warn of capture_layers, as vLLM captures the layers that the draft's own config.json names."""
    layers = fields.read("capture_layers")
    if layers is None or fields.method not in _LAYERS or (fields.draft and layers == fields.draft.capture_layers):
        return
    if -1 in layers:
        fields.warn("capture_layers", "not written: vLLM captures residual streams, none after the final norm")
        return
    name, first = _LAYERS[fields.method]
    ids = [i + first for i in layers]
    fields.warn("capture_layers", f"no setting of vLLM: the head's config.json must say {name}={ids}")


def _chain_only(fields: FieldMapper) -> None:
    fields.warn_if_set("max_total_draft_tokens", "not written: vLLM drafts a chain of num_speculative_tokens")
    fields.warn_if_set("dynamic_tree_max_topK", "not written: see max_total_draft_tokens")
    tree, k = fields.read("speculative_token_tree"), fields.read("num_speculative_tokens")
    if tree is not None and parse_tree(tree) != chain(k if isinstance(k, int) else len(parse_tree(tree)[-1])):
        fields.warn("speculative_token_tree", "not written: vLLM drafts a chain of num_speculative_tokens")
