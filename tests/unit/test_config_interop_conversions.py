"""Speculation as settings of TensorRT-LLM and of vLLM: the values that are converted, and the warnings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.interop_cases import (
    DFLASH,
    DRAFTED,
    DSPARK,
    EAGLE3,
    HEAD,
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
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.decoding_configs import decoding_config_from_dict
from trtspec.interop.export import settings_text

QUIET: dict[str, Any] = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
GREEDY: dict[str, Any] = {"draft_sample_method": "greedy"}
ONE_TO: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("fields", "expected", "warned"),
    [
        (
            {**NGRAM, **ONE_TO},
            {
                "decoding_type": "NGram",
                "max_draft_len": 3,
                "max_matching_ngram_size": 3,
                "is_use_oldest": True,
                "is_public_pool": False,
            },
            "",
        ),
        ({**NGRAM}, {"max_matching_ngram_size": 5}, "prompt_lookup_min"),
        ({**NGRAM, "prompt_lookup_min": 1}, {"max_matching_ngram_size": 1}, ""),
        (
            {**NGRAM, **ONE_TO, "prompt_lookup_latest": True},
            {"is_use_oldest": False, "is_public_pool": False},
            "prompt_lookup_latest",
        ),
        (
            {**NGRAM, **ONE_TO, "prompt_lookup_latest": True, "is_public_pool": True},
            {"is_use_oldest": False, "is_public_pool": True},
            "",
        ),
        (
            {**NGRAM, **ONE_TO, "is_public_pool": False, "is_keep_all": False, "ngram_pool_size": 9},
            {"is_use_oldest": True, "is_public_pool": False, "is_keep_all": False},
            "ngram_pool_size",
        ),
        (
            {**DRAFTED, **GREEDY},
            {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "/d"},
            "",
        ),
        ({**DRAFTED, **QUIET}, {"use_rejection_sampling": True}, ""),
        (DRAFTED, {}, "draft_sample_method"),
        ({**DRAFTED, **GREEDY, "parallel_drafting": True}, {"decoding_type": "PARD"}, ""),
        ({**DRAFTED, **GREEDY, "one_engine": False}, {"decoding_type": "Draft_Target"}, "one_engine"),
        (
            {**EAGLE3, **GREEDY, "capture_layers": (1, 4, -1)},
            {"eagle3_one_model": True, "eagle3_layers_to_capture": [1, 4, -1]},
            "",
        ),
        ({**DFLASH, **GREEDY}, {"decoding_type": "DFlash", "target_layer_ids": None}, ""),
        (
            {**DSPARK, **GREEDY, "capture_layers": (1, 4), "parallel_drafting": True},
            {"decoding_type": "DSpark", "target_layer_ids": [1, 4]},
            "",
        ),
        ({**DFLASH, **GREEDY, "capture_layers": (4, 1)}, {"target_layer_ids": [4, 1]}, "capture_layers"),
        ({**EAGLE3, **GREEDY, "capture_layers": (4, 1)}, {"eagle3_layers_to_capture": [4, 1]}, "capture_layers"),
        ({**EAGLE3, **GREEDY, "capture_layers": (1, 1)}, {"eagle3_layers_to_capture": [1, 1]}, "capture_layers"),
        ({**EAGLE3, **GREEDY}, {"eagle3_layers_to_capture": None}, "capture_layers"),
        (
            {**EAGLE3, **GREEDY, "capture_layers": (1,), "one_engine": False},
            {"eagle3_one_model": False},
            "one_engine",
        ),
        (
            {**EAGLE3, **GREEDY, "capture_layers": (1,), "speculative_token_tree": TREE},
            {"eagle_choices": [[0], [1], [0, 0], [0, 0, 0]], "max_total_draft_tokens": 4},
            "speculative_token_tree",
        ),
        (
            {**EAGLE3, **GREEDY, "capture_layers": (1,), "speculative_token_tree": TREE, "num_speculative_tokens": 4},
            {"max_draft_len": 3, "eagle_choices": [[0], [1], [0, 0], [0, 0, 0]], "max_total_draft_tokens": 4},
            "speculative_token_tree",
        ),
        (
            {**EAGLE3, **GREEDY, "capture_layers": (1,), "speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"},
            {"eagle_choices": None, "max_total_draft_tokens": None},
            "",
        ),
        ({**MTP, **GREEDY}, {"decoding_type": "MTP", "max_draft_len": 1, "mtp_eagle_one_model": True}, ""),
        ({"method": "mtp", **GREEDY}, {"max_draft_len": None}, ""),
        ({**MTP, **GREEDY, "vanilla": True}, {"use_mtp_vanilla": True, "mtp_eagle_one_model": None}, ""),
        ({**MTP, **GREEDY, "model": "/m"}, {"speculative_model": "/m"}, "model"),
        ({**SAVED, "write_interval": 5}, {"decoding_type": "SaveState", "write_interval": 5}, "output_directory"),
        ({"method": "auto"}, {"decoding_type": "AUTO"}, ""),
        (
            {"method": "auto", "max_concurrency": 9, "num_speculative_tokens": 3},
            {"decoding_type": "AUTO", "max_concurrency": None},
            "num_speculative_tokens max_concurrency",
        ),
        # draft lengths by batch size: batches above the largest key draft nothing
        ({**DRAFTED, **GREEDY, "max_concurrency": 8}, {"max_concurrency": 8, "draft_len_schedule": None}, ""),
        ({**DRAFTED, **GREEDY, "disable_by_batch_size": 8}, {"max_concurrency": 8, "draft_len_schedule": None}, ""),
        ({**DRAFTED, **GREEDY, "disable_by_batch_size": 8, "max_concurrency": 9}, {"max_concurrency": 8}, ""),
        ({"method": "mtp", **GREEDY, "disable_by_batch_size": 4}, {"max_concurrency": 4}, ""),
        ({**DRAFTED, **GREEDY, "draft_len_schedule": {4: 3, 8: 1}}, {"draft_len_schedule": {4: 3, 8: 1}}, ""),
        (
            {**DRAFTED, **GREEDY, "draft_len_schedule": {1: 3, 8: 1}},
            {"draft_len_schedule": {1: 3, 8: 1}},
            "draft_len_schedule",  # earlier versions read it differently
        ),
        (
            {**DRAFTED, **GREEDY, "num_speculative_tokens_per_batch_size": [(1, 4, 9), (8, 9, 1)]},
            {"draft_len_schedule": {7: 3, 1_000_000: 1}},
            "",
        ),
        (
            {**DRAFTED, **GREEDY, "num_speculative_tokens_per_batch_size": [(1, 4, 2)]},
            {"max_draft_len": 3, "draft_len_schedule": None},
            "num_speculative_tokens_per_batch_size",
        ),
        (
            {
                **DRAFTED,
                **GREEDY,
                "max_concurrency": 8,
                "num_speculative_tokens_per_batch_size": [(1, 4, 3), (5, 5, 1)],
            },
            {"draft_len_schedule": {4: 3, 8: 1}, "max_concurrency": None},
            "max_concurrency",
        ),
        (
            {"method": "mtp", **GREEDY, "num_speculative_tokens_per_batch_size": [(1, 4, 3)]},
            {"draft_len_schedule": None},
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_to_tensorrt_llm(fields: dict[str, Any], expected: dict[str, Any], warned: str) -> None:
    settings, lines = export(fields, TRT)
    assert {name: settings.get(name) for name in expected} == expected
    assert list(lines) == warned.split()
    decoding_config_from_dict(settings)  # by the rules of our reader, every field is valid


@pytest.mark.parametrize(
    ("fields", "expected", "warned"),
    [
        ({**NGRAM, **ONE_TO, **QUIET}, {**NGRAM, **ONE_TO, **QUIET}, ""),
        (NGRAM, NGRAM, "rejection_sample_method"),
        (EAGLE3, EAGLE3, "rejection_sample_method draft_sample_method"),
        ({**EAGLE3, **QUIET, "one_engine": True}, {**EAGLE3, **QUIET}, "one_engine"),
        ({**EAGLE3, **QUIET, "capture_layers": (1, 4)}, {**EAGLE3, **QUIET}, "capture_layers"),
        ({**EAGLE3, **QUIET, "parallel_drafting": True}, {**EAGLE3, **QUIET, "parallel_drafting": True}, ""),
        ({**DFLASH, **QUIET, "capture_layers": (1, 4)}, {**DFLASH, **QUIET}, "capture_layers"),
        (
            {**DSPARK, **QUIET, "capture_layers": (1, 4), "enable_adaptive_verification": True},
            {**DSPARK, **QUIET, "enable_adaptive_verification": True},
            "capture_layers",
        ),
        ({**DRAFTED, **QUIET, "one_engine": False}, {**DRAFTED, **QUIET}, "one_engine"),
        ({**DRAFTED, **QUIET, "quantization": "int4"}, {**DRAFTED, **QUIET}, "quantization"),
        ({**DRAFTED, **QUIET, "quantization": "fp8"}, {**DRAFTED, **QUIET, "quantization": "fp8"}, ""),
        ({**DRAFTED, **QUIET, "max_model_len": 9}, {**DRAFTED, **QUIET, "max_model_len": 9}, ""),
        ({**NGRAM, **QUIET, "max_model_len": 9}, {**NGRAM, **QUIET}, "max_model_len"),
        ({**MTP, **QUIET, "vanilla": True}, {**MTP, **QUIET}, "vanilla"),
        ({**MTP, "model": "/m", **QUIET}, {**MTP, "model": "/m", **QUIET}, ""),
        ({**DRAFTED, **QUIET, "model": "/EAGLE3/d"}, {**DRAFTED, **QUIET, "model": "/EAGLE3/d"}, "model"),
        ({**EAGLE3, **QUIET, "model": "/dspark/d"}, {**EAGLE3, **QUIET, "model": "/dspark/d"}, ""),
        (
            {**SUFFIX, "rejection_sample_method": "block", "suffix_decoding_max_cached_requests": 0},
            {**SUFFIX, "rejection_sample_method": "block", "suffix_decoding_max_cached_requests": 0},
            "",
        ),
        (
            {**NGRAM, **SYNTHETIC, "synthetic_acceptance_rates": (1.0, 0.5, 0.0)},
            {**NGRAM, **SYNTHETIC, "synthetic_acceptance_rates": [1.0, 0.5, 0.0]},
            "",
        ),
        ({**NGRAM, **QUIET, "enable_adaptive_verification": True}, {**NGRAM, **QUIET}, "enable_adaptive_verification"),
        (
            {**SAVED, "capture_layers": (1, 3, -1), "num_speculative_tokens": 2, "max_concurrency": 4},
            {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}},
            },
            "num_speculative_tokens max_concurrency capture_layers output_directory",
        ),
        # draft lengths by batch size: the last one holds for all larger batches
        (
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [(1, 4, 0)], "disable_by_batch_size": 8},
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [[1, 1, 0]]},
            "",
        ),
        (
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [(1, 4, 9)], "draft_len_schedule": {4: 3}},
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 5, 0]]},
            "",
        ),
        (
            {**NGRAM, **QUIET, "disable_by_batch_size": 8},
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 9, 0]]},
            "",
        ),
        (
            {**NGRAM, **QUIET, "draft_len_schedule": {4: 3, 8: 1}},
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1], [9, 9, 0]]},
            "",
        ),
        (
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [(1, 4, 9), (8, 9, 1)]},
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [[1, 4, 9], [8, 9, 1]]},
            "",
        ),
        (
            {**NGRAM, **QUIET, "max_concurrency": 8},
            {**NGRAM, **QUIET, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 9, 0]]},
            "max_concurrency",
        ),
    ],
)
def test_to_vllm(fields: dict[str, Any], expected: dict[str, Any], warned: str) -> None:
    settings, lines = export(fields, VLLM)
    assert settings == expected
    assert list(lines) == warned.split()
    assert json.loads(settings_text(settings, VLLM)) == expected


def test_layers_of_the_head_are_written_where_its_config_is_not_read() -> None:
    settings, lines = export({**EAGLE3, **GREEDY}, TRT, HEAD)
    assert settings["eagle3_layers_to_capture"] == [2, 5, 8]
    assert not lines
    for layers, warned in (((2, 5, 8), False), ((1, 4, 6), True)):  # vLLM reads the head's config
        settings, lines = export({**EAGLE3, **QUIET, "capture_layers": layers}, VLLM, HEAD)
        assert settings == {**EAGLE3, **QUIET}
        assert ("capture_layers" in lines) == warned
    assert lines["capture_layers"].endswith("config.json must say eagle_aux_hidden_state_layer_ids=[2, 5, 7]")
    lines = export({**DFLASH, **QUIET, "capture_layers": (1, 4)}, VLLM)[1]
    assert lines["capture_layers"].endswith("config.json must say dflash_config.target_layer_ids=[1, 4]")


def test_the_method_is_found_as_everywhere() -> None:
    fields = {"model": "/models/head", "num_speculative_tokens": 3}
    assert export(fields, VLLM, HEAD)[0]["method"] == "eagle3"
    assert export(fields, VLLM)[0]["method"] == "draft_model"
    assert export({"model": "[ngram]", "num_speculative_tokens": 3}, VLLM)[0] == NGRAM


def test_warnings_say_what_to_do() -> None:
    _, lines = export({**SAVED, "output_directory": "/o ut"}, VLLM)
    transfer = (
        '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", '
        '"kv_connector_extra_config": {"shared_storage_path": "/o ut"}}'
    )
    assert f"add --kv-transfer-config '{transfer}'" in lines["output_directory"]
    assert (
        "rejection_sample_method='strict': vLLM accepts by rejection sampling"
        in (export({**NGRAM, "rejection_sample_method": "strict"}, VLLM)[1]["rejection_sample_method"])
    )


@pytest.mark.parametrize(
    ("fields", "server", "message"),
    [
        ({"method": "ngram"}, TRT, r"num_speculative_tokens=None with method='ngram': TensorRT-LLM needs a number"),
        ({"method": "mtp"}, VLLM, r"num_speculative_tokens=None with method='mtp': vLLM needs a number; set it"),
        ({**SAVED, "capture_layers": None}, VLLM, r"capture_layers=None with method='extract_hidden.*: vLLM needs"),
        ({**SAVED, "capture_layers": (-1,)}, VLLM, r"capture_layers=\(-1,\) with method='extract_hidden.*saves none"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 9}, TRT, r"means nothing to method='ngram'; remove it"),
        ({"method": "eagle3"}, VLLM, r"method='eagle3', model=None: set model"),
        (NGRAM, "sglang", r"server='sglang' is unknown; use one of tensorrt-llm, vllm"),
    ],
)
def test_contradictions(fields: dict[str, Any], server: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export(fields, server)


def test_parallel_heads_have_no_equal() -> None:
    with pytest.raises(UnsupportedError, match=r"method='eagle3' has no equal in .*parallel_drafting=True; nearest: "):
        export({**EAGLE3, "parallel_drafting": True}, TRT)


def test_a_method_that_nobody_wrote_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is in the table of methods but has no TensorRT-LLM type is refused."""
    from trtspec.interop import tensorrt_llm

    monkeypatch.delitem(tensorrt_llm._TYPES, "dspark")
    with pytest.raises(UnsupportedError, match="method='dspark' has no equal in TensorRT-LLM; nearest: "):
        export(DSPARK, TRT)
