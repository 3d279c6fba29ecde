"""SpeculativeConfig -> TensorRT-LLM's speculative_config, which its LLM API takes and its YAML files hold.

Names and meanings are those of mid 2026. Earlier versions have allow_advanced_sampling, without which one-model modes
ignore sampling parameters. Later versions call it deprecated, so it is not written.
"""

from __future__ import annotations

from typing import Any

from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.config.tree import chain, parse_tree
from trtspec.interop.decoding_configs import DECODING_CONFIGS, PARDDecodingConfig
from trtspec.interop.field_mapper import FieldMapper, FieldWarning, draft_len_steps
from trtspec.methods.ngram.options import lookup_sizes

SERVER = "TensorRT-LLM"

_TYPES = {kind.method: kind.decoding_type for kind in DECODING_CONFIGS if kind is not PARDDecodingConfig}
_NEAREST = {
    "custom_class": "UserProvidedDecodingConfig in Python, which takes an object of TensorRT-LLM's own Drafter: a "
    "drafter written for trtspec.protocols.Drafter does not run there; from a file, decoding_type NGram",
    "eagle": "decoding_type Eagle3, with an EAGLE3 head",
    "grammar": "decoding_type NGram, which drafts from the prompt and the text so far",
    "medusa": "decoding_type Eagle3: its PyTorch backend runs no Medusa heads",
    "mlp_speculator": "decoding_type Eagle3, or Draft_Target with a small model",
    "suffix": "decoding_type SA (a suffix automaton: longest match, no counts), or NGram",
}
# Methods for which num_speculative_tokens may be unset in TensorRT-LLM too.
_K_OPTIONAL = ("mtp", "extract_hidden_states")
# A schedule ends with its largest key; this key stands for "and all above". Requests per step.
_ANY_BATCH = 1_000_000


def to_tensorrt_llm(
    config: SpeculativeConfig, draft: DraftInfo | None = None
) -> tuple[dict[str, Any], list[FieldWarning]]:
    """Return (speculative_config, a warning for each field that is different in TensorRT-LLM).

    draft: what is known of the draft checkpoint. Raises UnsupportedError for a method that TensorRT-LLM does not have,
    and names the nearest. Raises ConfigError for what contradicts itself, or lacks something that TensorRT-LLM needs.
    """
    fields = FieldMapper(config, draft)
    method = fields.method
    if method in _NEAREST or method not in _TYPES:
        raise fields.refuse(SERVER, _NEAREST.get(method, "decoding_type NGram, which needs no draft"))
    if method == "auto":
        return _auto(fields)
    settings: dict[str, Any] = {"decoding_type": _decoding_type(fields)}
    unset = method in _K_OPTIONAL and not fields.is_set("num_speculative_tokens")
    k = fields.read("num_speculative_tokens") if unset else fields.draft_len(SERVER)
    if k is not None:
        settings["max_draft_len"] = k
    if fields.model is not None:
        settings["speculative_model"] = fields.model
    settings.update(_gates(fields, k))
    settings.update(_OWN.get(method, _nothing)(fields))
    if not fields.has_both_engines():
        fields.read("one_engine")  # there was nothing to choose
    settings.update(_tree(fields, k))
    settings.update(_lookups(fields, settings["decoding_type"]))
    settings.update(_acceptance(fields))
    _warn_of_draft_model(fields)
    return settings, fields.close(SERVER)


def _auto(fields: FieldMapper) -> tuple[dict[str, Any], list[FieldWarning]]:
    for field in type(fields.config).model_fields:
        if field != "method":
            fields.warn_if_set(field, "not written: with AUTO, TensorRT-LLM ignores every other setting")
    return {"decoding_type": _TYPES["auto"]}, fields.close(SERVER)


def _decoding_type(fields: FieldMapper) -> str:
    if not fields.read("parallel_drafting") or fields.in_parallel_anyway():
        return _TYPES[fields.method]
    if fields.method != PARDDecodingConfig.method:
        raise fields.refuse(
            f"{SERVER} with parallel_drafting=True", "method='draft_model' (PARD), 'dflash' or 'dspark'"
        )
    return PARDDecodingConfig.decoding_type


def _gates(fields: FieldMapper, k: int | None) -> dict[str, Any]:
    """Settings of K by batch size: max_concurrency if that says it all, else one draft_len_schedule for all gates."""
    gates = fields.gates()
    if set(gates) <= {"disable_by_batch_size", "max_concurrency"}:  # more requests than these draft nothing
        sizes = [getattr(fields.config, field) for field in gates]
        return {"max_concurrency": min(sizes)} if sizes else {}
    if k is None:
        fields.warn_gates(gates, "it depends on num_speculative_tokens, which is not set")
        return {}
    steps = draft_len_steps(fields.config, k)
    if steps[0][1] != k:
        fields.warn_gates(gates, "TensorRT-LLM wants the smallest batches to draft max_draft_len tokens")
        return {}
    if "max_concurrency" in gates:
        fields.warn(
            "max_concurrency",
            "part of draft_len_schedule, which counts the requests that run, also where max_num_tokens holds fewer",
        )
    if len(steps) == 1:
        return {}
    schedule = {size or _ANY_BATCH: length for size, length in steps}
    if schedule.get(_ANY_BATCH) == 0:
        del schedule[_ANY_BATCH]  # batches above the largest key draft nothing
    if 1 in schedule:  # earlier versions refuse a schedule without that key
        fields.warn(
            next(field for field in gates if field != "max_concurrency"),
            "TensorRT-LLM before mid 2026 takes the keys of draft_len_schedule for the smallest batch sizes, not the "
            "largest",
        )
    return {"draft_len_schedule": schedule}


# -- settings of single methods -------------------------------------------------------------------------------------


def _nothing(fields: FieldMapper) -> dict[str, Any]:
    return {}


def _eagle3(fields: FieldMapper) -> dict[str, Any]:
    layers = fields.read("capture_layers")
    if layers is None and fields.draft is not None:
        layers = fields.draft.capture_layers  # TensorRT-LLM does not read them from the head's config.json
    elif layers is None:
        fields.warn(
            "capture_layers",
            "TensorRT-LLM takes (1, n//2 - 1, n - 4) of n layers, whatever the head's config.json says",
        )
    return {"eagle3_one_model": _one_engine(fields), **_layers(fields, layers, "eagle3_layers_to_capture")}


def _block(fields: FieldMapper) -> dict[str, Any]:
    return _layers(fields, fields.read("capture_layers"), "target_layer_ids")


def _layers(fields: FieldMapper, layers: tuple[int, ...] | None, name: str) -> dict[str, Any]:
    """Setting of the captured layers. Ids mean "after layer i" in TensorRT-LLM too, but they are a set."""
    if layers is None:
        return {}
    ordered = (*sorted({i for i in layers if i >= 0}), *((-1,) if -1 in layers else ()))
    if layers != ordered:
        fields.warn("capture_layers", f"TensorRT-LLM captures a set of layers, in the order {ordered}", layers)
    return {name: list(layers)}


def _mtp(fields: FieldMapper) -> dict[str, Any]:
    if fields.model is not None:
        fields.warn("model", "TensorRT-LLM runs the MTP layers of the target's own checkpoint")
    vanilla = fields.read("vanilla")
    one_engine = _one_engine(fields)
    return {"use_mtp_vanilla": True} if vanilla else {"mtp_eagle_one_model": one_engine}


def _one_engine(fields: FieldMapper) -> bool:
    """Whether drafts are made inside the target's graph: yes, unless the user asks for the opposite."""
    one_engine = fields.read("one_engine") is not False
    if not one_engine:
        fields.warn("one_engine", "two models are deprecated in TensorRT-LLM, and removed in mid 2026")
    return one_engine


def _ngram(fields: FieldMapper) -> dict[str, Any]:
    low, high = lookup_sizes(fields.config)
    fields.read("prompt_lookup_min")
    fields.read("prompt_lookup_max")
    if low != 1:
        fields.warn("prompt_lookup_min", "TensorRT-LLM goes on to shorter matches, down to 1 token", low)
    pool, latest = fields.read("is_public_pool"), fields.read("prompt_lookup_latest")
    if pool is None and latest:
        fields.warn("prompt_lookup_latest", "TensorRT-LLM takes the newest match that is not known already")
    fields.warn_if_set("ngram_pool_size", "not written: TensorRT-LLM's pool grows without end")
    return {
        "max_matching_ngram_size": high,
        "is_use_oldest": not latest,
        "is_public_pool": bool(pool),  # TensorRT-LLM's default is True: requests find each other's tokens
        **fields.read_plain("is_keep_all"),
    }


def _hidden_states(fields: FieldMapper) -> dict[str, Any]:
    folder = fields.read("output_directory")
    fields.warn("output_directory", "TensorRT-LLM writes .pt files there, trtspec .safetensors shards")
    return {
        "output_directory": folder,
        **fields.read_plain("write_interval", "file_prefix"),
        **_layers(fields, fields.read("capture_layers"), "eagle3_layers_to_capture"),
    }


_OWN = {
    "dflash": _block,
    "dspark": _block,
    "eagle3": _eagle3,
    "extract_hidden_states": _hidden_states,
    "mtp": _mtp,
    "ngram": _ngram,
}


# -- settings of all methods ----------------------------------------------------------------------------------------


def _tree(fields: FieldMapper, k: int | None) -> dict[str, Any]:
    nodes, top_k = fields.read("max_total_draft_tokens"), fields.read("dynamic_tree_max_topK")
    if nodes is not None:
        if fields.method == "eagle3" and k is not None and top_k is not None and nodes <= top_k * k:
            return {"use_dynamic_tree": True, "dynamic_tree_max_topK": top_k, "max_total_draft_tokens": nodes}
        fields.warn(
            "max_total_draft_tokens",
            "not written: TensorRT-LLM has such trees for EAGLE3, of at most dynamic_tree_max_topK nodes per depth",
        )
        fields.warn_if_set("dynamic_tree_max_topK", "not written: see max_total_draft_tokens")
        return {}
    text = fields.read("speculative_token_tree")
    if text is None:
        return {}
    paths = parse_tree(text)
    if paths == chain(k or len(paths[-1])):
        return {}
    if fields.method != "eagle3" or len(paths[-1]) != k:
        fields.warn("speculative_token_tree", "not written: TensorRT-LLM drafts a chain of max_draft_len tokens")
        return {}
    fields.warn("speculative_token_tree", "static trees are deprecated in TensorRT-LLM: later versions refuse them")
    return {"max_total_draft_tokens": len(paths), "eagle_choices": [list(path) for path in paths]}


def _lookups(fields: FieldMapper, decoding_type: str) -> dict[str, Any]:
    lookups = fields.read("sa_config")
    if lookups is None:
        return {}
    if decoding_type not in ("Eagle3", "MTP", "PARD"):
        fields.warn("sa_config", "not written: TensorRT-LLM has it for Eagle3, MTP and PARD")
        return {}
    return {"sa_config": lookups.model_dump()}


def _acceptance(fields: FieldMapper) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    method = fields.read("rejection_sample_method")
    exact = "not written: TensorRT-LLM accepts a draft that equals the token it draws itself"
    if method == "standard" and fields.has_draft:
        settings["use_rejection_sampling"] = True
    elif method not in (None, "strict"):
        fields.warn("rejection_sample_method", exact)
    forced = f"{exact} (TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS in its environment forces a number)"
    fields.warn_if_set("synthetic_acceptance_rates", forced)
    fields.warn_if_set("synthetic_acceptance_length", forced)
    drawn = fields.read("draft_sample_method")
    if fields.has_draft and drawn != "greedy":
        fields.warn(
            "draft_sample_method",
            "TensorRT-LLM drafts the most likely tokens, which sampled requests accept less often than tokens drawn "
            "with the target's noise (set 'greedy' to ask for that)",
        )
    elif drawn == "probabilistic":
        fields.warn("draft_sample_method", "not written: nothing is drawn where no model drafts")
    return {**settings, **fields.read_plain("acceptance_window", "acceptance_length_threshold")}


def _warn_of_draft_model(fields: FieldMapper) -> None:
    """Warn of the fields that TensorRT-LLM decides from the checkpoint, or for the whole engine."""
    whole = "not written: TensorRT-LLM has it for the whole engine"
    fields.warn_if_set("revision", "not written: give the folder of that revision as the model")
    fields.warn_if_set("code_revision", "not written: give the folder of that revision as the model")
    fields.warn_if_set("quantization", "not written: TensorRT-LLM takes the draft's weights as they are stored")
    fields.warn_if_set("enforce_eager", f"{whole} (cuda_graph_config)")
    fields.warn_if_set("draft_tensor_parallel_size", f"{whole} (tensor_parallel_size)")
    fields.warn_if_set("max_model_len", f"{whole} (max_seq_len)")
    fields.warn_if_set("disable_padded_drafter_batch", "not written: TensorRT-LLM pads draft batches as it needs")
    fields.warn_if_set("disable_logprobs", "not written: TensorRT-LLM returns logprobs whenever a request asks")
    fields.warn_if_set("use_heterogeneous_vocab", "not written: TensorRT-LLM wants a draft of the target's vocabulary")
    fields.warn_if_set("enable_adaptive_verification", "not written: TensorRT-LLM verifies every draft")
