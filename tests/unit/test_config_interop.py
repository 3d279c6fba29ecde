"""Speculation as settings of TensorRT-LLM and of vLLM: every method, every field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.interop_cases import (
    CUSTOM,
    DFLASH,
    DRAFTED,
    DSPARK,
    EAGLE3,
    MTP,
    NGRAM,
    SAVED,
    SUFFIX,
    SYNTHETIC,
    TREE,
    TRT,
    VLLM,
    export,
)
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import UnsupportedError
from trtspec.interop.decoding_configs import decoding_config_from_dict
from trtspec.interop.export import SERVERS
from trtspec.modes import METHODS

# -- every method -----------------------------------------------------------------------------------------------------

BY_METHOD: dict[str, dict[str, Any]] = {
    "draft_model": DRAFTED,
    "eagle3": EAGLE3,
    "mtp": MTP,
    "ngram": NGRAM,
    "extract_hidden_states": SAVED,
    "custom_class": CUSTOM,
    "auto": {"method": "auto"},
    "suffix": SUFFIX,
    "medusa": {**EAGLE3, "method": "medusa"},
    "mlp_speculator": {**EAGLE3, "method": "mlp_speculator"},
    "eagle": {**EAGLE3, "method": "eagle"},
    "dflash": DFLASH,
    "dspark": DSPARK,
    "grammar": {"method": "grammar"},
}
NEAREST = {
    ("custom_class", TRT): "UserProvidedDecodingConfig in Python",
    ("suffix", TRT): "decoding_type SA",
    ("medusa", TRT): "decoding_type Eagle3",
    ("mlp_speculator", TRT): "decoding_type Eagle3, or Draft_Target",
    ("eagle", TRT): "decoding_type Eagle3",
    ("custom_class", VLLM): "vLLM's own custom_class",
    ("auto", VLLM): "method='ngram'",
    ("grammar", TRT): "decoding_type NGram",
    ("grammar", VLLM): "method='ngram'",
    ("mlp_speculator", VLLM): "method='medusa' or 'eagle3'",
}


def test_every_method_is_here() -> None:
    assert set(BY_METHOD) == set(METHODS)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("method", METHODS)
def test_method(method: str, server: str) -> None:
    """A method exports settings under the server's name for it, or raises an error that names the nearest method.

    It never exports an empty file.
    """
    if (method, server) in NEAREST:
        with pytest.raises(UnsupportedError, match=f"method='{method}' has no equal in .*nearest: ") as raised:
            export(BY_METHOD[method], server)
        assert NEAREST[method, server] in str(raised.value)
        return
    settings, _ = export(BY_METHOD[method], server)
    if server == VLLM:
        assert settings["method"] == method
        assert settings.get("model") == BY_METHOD[method].get("model")
    else:
        config = decoding_config_from_dict(settings)
        assert config.decoding_type == settings["decoding_type"]  # in TensorRT-LLM's own spelling
        assert config.method in (method, "")
        assert config.speculative_model == BY_METHOD[method].get("model")


# -- every field ------------------------------------------------------------------------------------------------------

# field -> (the rest of a config, a value of the field that differs from the rest's)
FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    "num_speculative_tokens": (NGRAM, 4),
    "model": (DRAFTED, "/other"),
    "method": (DRAFTED, "eagle3"),
    "one_engine": (EAGLE3, False),
    "vanilla": (MTP, True),
    "revision": (DRAFTED, "main"),
    "code_revision": (DRAFTED, "main"),
    "quantization": (DRAFTED, "int8"),
    "enforce_eager": (DRAFTED, False),
    "draft_tensor_parallel_size": (DRAFTED, 1),
    "max_model_len": (DRAFTED, 100),
    "disable_padded_drafter_batch": (DRAFTED, True),
    "disable_logprobs": (DRAFTED, True),
    "disable_by_batch_size": (DRAFTED, 8),
    "draft_len_schedule": (DRAFTED, {4: 3, 8: 1}),
    "num_speculative_tokens_per_batch_size": (DRAFTED, [(1, 4, 3), (5, 8, 1)]),
    "max_concurrency": (DRAFTED, 8),
    "acceptance_window": ({**DRAFTED, "acceptance_length_threshold": 1.0}, 10),
    "acceptance_length_threshold": ({**DRAFTED, "acceptance_window": 10}, 0.5),
    "prompt_lookup_min": (NGRAM, 2),
    "prompt_lookup_max": (NGRAM, 7),
    "prompt_lookup_latest": (NGRAM, True),
    "is_public_pool": (NGRAM, True),
    "is_keep_all": ({**NGRAM, "is_public_pool": True}, False),
    "ngram_pool_size": ({**NGRAM, "is_public_pool": True}, 7),
    "suffix_decoding_max_tree_depth": (SUFFIX, 12),
    "suffix_decoding_max_cached_requests": (SUFFIX, 0),
    "suffix_decoding_max_spec_factor": (SUFFIX, 2.0),
    "suffix_decoding_min_token_prob": (SUFFIX, 0.5),
    "rejection_sample_method": (DRAFTED, "block"),
    "synthetic_acceptance_rates": ({**DRAFTED, **SYNTHETIC}, [0.9, 0.5, 0.1]),
    "synthetic_acceptance_length": ({**DRAFTED, **SYNTHETIC}, 2.5),
    "sa_config": (EAGLE3, {"threshold": 3}),
    "draft_sample_method": (DRAFTED, "probabilistic"),
    "speculative_token_tree": (EAGLE3, TREE),
    "max_total_draft_tokens": ({**EAGLE3, "dynamic_tree_max_topK": 2}, 5),
    "dynamic_tree_max_topK": ({**EAGLE3, "max_total_draft_tokens": 6}, 3),
    "use_heterogeneous_vocab": (DRAFTED, True),
    "draft_confidence_threshold": (DSPARK, 0.5),
    "parallel_drafting": (DRAFTED, True),
    "enable_adaptive_verification": (DRAFTED, True),
    "capture_layers": (EAGLE3, (1, 4, 6)),
    "output_directory": (SAVED, "/elsewhere"),
    "write_interval": (SAVED, 5),
    "file_prefix": (SAVED, "states"),
    "drafter": (CUSTOM, "m:D"),
}
# Base configs for the fields whose rest is not a valid config without the field.
ALONE = {
    "max_total_draft_tokens": EAGLE3,
    "acceptance_window": DRAFTED,
    "acceptance_length_threshold": DRAFTED,
    "synthetic_acceptance_rates": DRAFTED,
    "synthetic_acceptance_length": DRAFTED,
}


def test_every_field_is_here() -> None:
    assert set(FIELDS) == set(SpeculativeConfig.model_fields)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("field", FIELDS)
def test_no_field_is_dropped_in_silence(field: str, server: str) -> None:
    """A field that is set changes the exported settings or is named in a warning, unless its method is refused."""
    rest, value = FIELDS[field]
    try:
        settings, lines = export({**rest, field: value}, server)
    except UnsupportedError as error:
        if (rest["method"], server) not in NEAREST:
            raise AssertionError(f"{field} is refused, not the method") from error
        return
    before, _ = export(ALONE.get(field, rest), server)
    assert settings != before or field in lines
    shown = repr(getattr(SpeculativeConfig(**{**rest, field: value}), field))
    assert field not in lines or lines[field].startswith(f"{field}={shown}: ")


def test_a_field_that_nobody_knows_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is in SpeculativeConfig but not handled by the export is not written and gets a warning."""
    from trtspec.interop import tensorrt_llm as interop_trtllm

    monkeypatch.setattr(interop_trtllm, "_warn_of_draft_model", lambda fields: None)
    settings, lines = export({**DRAFTED, "revision": "main"}, TRT)
    assert lines["revision"] == "revision='main': not written: TensorRT-LLM has no such setting"
    assert "revision" not in settings
