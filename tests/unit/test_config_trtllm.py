"""TensorRT-LLM's decoding configs: their defaults, their conversions and their refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.interop.decoding_configs import (
    DECODING_CONFIGS,
    AutoDecodingConfig,
    DecodingBaseConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    Eagle3DecodingConfig,
    MedusaDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PARDDecodingConfig,
    SADecodingConfig,
    SaveHiddenStatesDecodingConfig,
    UserProvidedDecodingConfig,
    decoding_config_from_dict,
)
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import plan_unchecked
from trtspec.modes import SpeculativeDecodingMode as M


def words(text: str) -> list[str]:
    return text.split()


BASE = {
    **dict.fromkeys(
        words(
            "max_draft_len max_total_draft_tokens speculative_model max_concurrency draft_len_schedule "
            "acceptance_window acceptance_length_threshold"
        )
    ),
    "use_rejection_sampling": False,
    "allow_advanced_sampling": False,
    "advanced_sampling_mode": "full",
}
OWN: dict[type[DecodingBaseConfig], dict[str, Any]] = {
    Eagle3DecodingConfig: {
        "eagle3_one_model": True,
        "eagle3_layers_to_capture": None,
        "eagle3_model_arch": "llama3",
        "eagle_choices": None,
        "greedy_sampling": True,
        "posterior_threshold": None,
        "use_dynamic_tree": False,
        "dynamic_tree_max_topK": None,
        "num_eagle_layers": None,
        "max_non_leaves_per_layer": None,
        "sa_config": None,
    },
    MTPDecodingConfig: {
        "use_relaxed_acceptance_for_thinking": False,
        "relaxed_topk": 1,
        "relaxed_delta": 0.0,
        "use_mtp_vanilla": False,
        "mtp_eagle_one_model": True,
        "num_nextn_predict_layers": None,
        "begin_thinking_phase_token": 128798,
        "end_thinking_phase_token": 128799,
        "sa_config": None,
    },
    NGramDecodingConfig: {
        "max_matching_ngram_size": 2,
        "is_keep_all": True,
        "is_use_oldest": True,
        "is_public_pool": True,
    },
    DraftTargetDecodingConfig: {},
    UserProvidedDecodingConfig: {"drafter": None, "resource_manager": None},
    AutoDecodingConfig: {},
    SaveHiddenStatesDecodingConfig: {
        "output_directory": "/out",
        "write_interval": 20,
        "file_prefix": "data",
        "eagle3_layers_to_capture": None,
    },
    MedusaDecodingConfig: {"medusa_choices": None, "num_medusa_heads": None},
    SADecodingConfig: {"max_matching_ngram_size": -1, "enable_global_pool": False, "global_pool_size": None},
    PARDDecodingConfig: {"mask_token_id": None, "target_layer_ids": None, "sa_config": None},
    DFlashDecodingConfig: {"mask_token_id": None, "target_layer_ids": None},
    DSparkDecodingConfig: {"mask_token_id": None, "target_layer_ids": None},
}
REQUIRED: dict[type[DecodingBaseConfig], dict[str, Any]] = {
    SaveHiddenStatesDecodingConfig: {"output_directory": "/out"}
}
ONE_ENGINE_EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "/e", "one_engine": True}
TARGET = TargetInfo(
    model="/t", model_type="llama", vocab_size=100, max_model_len=64, num_hidden_layers=8, max_batch_size=4
)


def test_every_config_is_listed() -> None:
    assert set(DECODING_CONFIGS) == set(OWN)


@pytest.mark.parametrize("cls", OWN)
def test_defaults(cls: type[DecodingBaseConfig]) -> None:
    assert cls(**REQUIRED.get(cls, {})).model_dump() == {**BASE, **OWN[cls]}


@pytest.mark.parametrize("cls", OWN)
def test_unknown_fields_are_errors(cls: type[DecodingBaseConfig]) -> None:
    with pytest.raises(ConfigError, match=r"max_draft_length=3: unknown field; did you mean 'max_draft_len'"):
        cls(**REQUIRED.get(cls, {}), max_draft_length=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            NGramDecodingConfig(max_draft_len=4),
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
                "is_public_pool": True,
            },
        ),
        (
            NGramDecodingConfig(
                max_draft_len=4,
                max_matching_ngram_size=3,
                is_keep_all=False,
                is_use_oldest=False,
                is_public_pool=False,
                max_concurrency=2,
            ),
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
                "prompt_lookup_latest": True,
                "is_public_pool": False,
                "is_keep_all": False,
                "max_concurrency": 2,
            },
        ),
        (
            DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir="/d", draft_len_schedule={4: 3, 8: 1}),
            {
                "method": "draft_model",
                "num_speculative_tokens": 3,
                "model": "/d",
                "draft_len_schedule": {4: 3, 8: 1},
            },
        ),
        (
            DraftTargetDecodingConfig(
                max_draft_len=3, max_total_draft_tokens=3, speculative_model=Path("/d"), acceptance_window=0
            ),
            {"method": "draft_model", "num_speculative_tokens": 3, "model": "/d"},
        ),
        (
            UserProvidedDecodingConfig(max_draft_len=3, drafter="m:C"),
            {"method": "custom_class", "num_speculative_tokens": 3, "drafter": "m:C"},
        ),
        (AutoDecodingConfig(), {"method": "auto"}),
        (
            Eagle3DecodingConfig(
                max_draft_len=3, speculative_model="/e", eagle3_layers_to_capture=[2, -1, 1, 2], dynamic_tree_max_topK=1
            ),
            {
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "model": "/e",
                "one_engine": True,
                "capture_layers": (1, 2, -1),
            },
        ),
        (
            Eagle3DecodingConfig(max_draft_len=3, speculative_model="/e", eagle3_one_model=False),
            {"method": "eagle3", "num_speculative_tokens": 3, "model": "/e", "one_engine": False},
        ),
        (
            SaveHiddenStatesDecodingConfig(
                output_directory="/o", write_interval=3, file_prefix="x", eagle3_layers_to_capture={-1, 7, 0}
            ),
            {
                "method": "extract_hidden_states",
                "output_directory": "/o",
                "write_interval": 3,
                "file_prefix": "x",
                "capture_layers": (0, 7, -1),
            },
        ),
        (MTPDecodingConfig(), {"method": "mtp", "one_engine": True}),
        (
            MTPDecodingConfig(num_nextn_predict_layers=3, max_total_draft_tokens=3),
            {"method": "mtp", "one_engine": True, "num_speculative_tokens": 3},
        ),
        (MedusaDecodingConfig(speculative_model="/m"), {"method": "medusa", "model": "/m"}),
        (MedusaDecodingConfig(num_medusa_heads=4), {"method": "medusa", "num_speculative_tokens": 4}),
        (
            MedusaDecodingConfig(num_medusa_heads=4, max_draft_len=3),
            {"method": "medusa", "num_speculative_tokens": 3},
        ),
        (
            MedusaDecodingConfig(num_medusa_heads=4, medusa_choices=[[0, 0], [0]]),
            {"method": "medusa", "num_speculative_tokens": 2},
        ),
        (
            MedusaDecodingConfig(medusa_choices=[[0], [1], [0, 0]], max_total_draft_tokens=3),
            {"method": "medusa", "num_speculative_tokens": 2, "speculative_token_tree": "[(0,), (1,), (0, 0)]"},
        ),
        (
            Eagle3DecodingConfig(eagle_choices=[[0], [1]], max_draft_len=1, speculative_model="/e"),
            {**ONE_ENGINE_EAGLE3, "num_speculative_tokens": 1, "speculative_token_tree": "[(0,), (1,)]"},
        ),
        (
            Eagle3DecodingConfig(eagle_choices="[[0], [0, 0]]", speculative_model="/e"),
            {**ONE_ENGINE_EAGLE3, "num_speculative_tokens": 2},
        ),
        (PARDDecodingConfig(), {"method": "draft_model", "parallel_drafting": True}),
        (DFlashDecodingConfig(target_layer_ids=[1, 4]), {"method": "dflash", "capture_layers": (1, 4)}),
        (DSparkDecodingConfig(target_layer_ids=[1, 4]), {"method": "dspark", "capture_layers": (1, 4)}),
        (MTPDecodingConfig(mtp_eagle_one_model=False), {"method": "mtp", "one_engine": False}),
        (
            MTPDecodingConfig(use_mtp_vanilla=True, mtp_eagle_one_model=False, num_nextn_predict_layers=3),
            {"method": "mtp", "one_engine": True, "vanilla": True, "num_speculative_tokens": 3},
        ),
    ],
)
def test_converts(config: DecodingBaseConfig, expected: dict[str, Any]) -> None:
    assert config.to_speculative_config() == SpeculativeConfig(**expected)
    assert read_speculative_config(config) == SpeculativeConfig(**expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            NGramDecodingConfig(acceptance_window=4),
            r"NGramDecodingConfig.acceptance_window=4 is not built yet; leave it",
        ),
        (
            NGramDecodingConfig(acceptance_length_threshold=1.0),
            r"acceptance_length_threshold=1.0 is not built yet; leave",
        ),
        (
            NGramDecodingConfig(use_rejection_sampling=True),
            r"use_rejection_sampling=True is not built yet; leave it False",
        ),
        (
            NGramDecodingConfig(advanced_sampling_mode="no_topk"),
            r"advanced_sampling_mode='no_topk' is not built yet; leave",
        ),
        (UserProvidedDecodingConfig(drafter="m:C", resource_manager=object()), r"resource_manager=<object.*; keep the"),
        (
            Eagle3DecodingConfig(eagle3_model_arch="mistral_large3"),
            r"eagle3_model_arch='mistral_large3' is not built yet",
        ),
        (Eagle3DecodingConfig(greedy_sampling=False), r"greedy_sampling=False is not built yet; leave it True"),
        (Eagle3DecodingConfig(posterior_threshold=0.1), r"posterior_threshold=0.1 is not built yet; leave it unset"),
        (Eagle3DecodingConfig(num_eagle_layers=2), r"num_eagle_layers=2 is not built yet; leave it unset"),
        (Eagle3DecodingConfig(max_non_leaves_per_layer=2), r"max_non_leaves_per_layer=2 is not built yet"),
        (
            MTPDecodingConfig(use_relaxed_acceptance_for_thinking=True),
            r"use_relaxed_.*=True is not built yet; leave it",
        ),
        (MTPDecodingConfig(relaxed_topk=5), r"relaxed_topk=5 is not built yet"),
        (MTPDecodingConfig(relaxed_delta=0.5), r"relaxed_delta=0.5 is not built yet"),
        (MTPDecodingConfig(begin_thinking_phase_token=1), r"begin_thinking_phase_token=1 is not built yet"),
        (MTPDecodingConfig(end_thinking_phase_token=1), r"end_thinking_phase_token=1 is not built yet"),
        (SADecodingConfig(), r"decoding_type='SA' is not built yet"),
        (PARDDecodingConfig(mask_token_id=3), r"mask_token_id=3 is not built yet; leave it unset: the draft's config"),
        (PARDDecodingConfig(target_layer_ids=[3]), r"target_layer_ids=\(3,\) is not built yet; leave it unset"),
        (DFlashDecodingConfig(mask_token_id=3), r"mask_token_id=3 is not built yet; leave it unset"),
        (DSparkDecodingConfig(mask_token_id=3), r"mask_token_id=3 is not built yet; leave it unset"),
    ],
)
def test_not_built(config: DecodingBaseConfig, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        config.to_speculative_config()


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (NGramDecodingConfig, {"max_draft_len": 0}, r"max_draft_len=0: .*equal to 1 \(draft tokens per step, K\)"),
        (NGramDecodingConfig, {"max_matching_ngram_size": 0}, r"max_matching_ngram_size=0: .*equal to 1"),
        (
            NGramDecodingConfig,
            {"advanced_sampling_mode": "x"},
            r"advanced_sampling_mode='x' is unknown; use one of full",
        ),
        (SaveHiddenStatesDecodingConfig, {}, r"output_directory=None: it is required; set it"),
        (
            Eagle3DecodingConfig,
            {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_draft_len": 3, "max_total_draft_tokens": 7},
            r"max_total_draft_tokens=7 with max_draft_len=3, dynamic_tree_max_topK=2; use a value in \[3, 6\]",
        ),
        (
            Eagle3DecodingConfig,
            {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_draft_len": 3, "max_total_draft_tokens": 2},
            r"max_total_draft_tokens=2 .*use a value in \[3, 6\]",
        ),
        (
            MTPDecodingConfig,
            {"num_nextn_predict_layers": 2, "max_draft_len": 3},
            r"num_nextn_predict_layers=2 and max_draft_len=3 differ; set max_draft_len only",
        ),
        (
            MedusaDecodingConfig,
            {"num_medusa_heads": 2, "max_draft_len": 3},
            r"3 drafts exceed num_medusa_heads=2, each of which drafts one token; lower K",
        ),
        (
            NGramDecodingConfig,
            {"max_draft_len": 3, "draft_len_schedule": {4: 3}, "max_concurrency": 4},
            r"draft_len_schedule=\{4: 3\} and max_concurrency=4 exclude each other",
        ),
        (NGramDecodingConfig, {"max_draft_len": 3, "draft_len_schedule": {4: 2}}, r"\{4: 2\} does not fit"),
        (UserProvidedDecodingConfig, {"max_draft_len": 3}, r"drafter=None with method='custom_class'; set drafter"),
    ],
)
def test_contradictions(cls: type[DecodingBaseConfig], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**fields).to_speculative_config()


@pytest.mark.parametrize(
    ("config", "n_predict", "mode", "k"),
    [
        (NGramDecodingConfig(max_draft_len=4), None, M.NGRAM, 4),
        (AutoDecodingConfig(), None, M.NGRAM, 5),
        (Eagle3DecodingConfig(max_draft_len=3, speculative_model="/e"), None, M.EAGLE3_ONE_MODEL, 3),
        (Eagle3DecodingConfig(max_draft_len=3, speculative_model="/e", eagle3_one_model=False), None, M.EAGLE3, 3),
        (MTPDecodingConfig(), 1, M.MTP_EAGLE_ONE_MODEL, 1),
        (PARDDecodingConfig(max_draft_len=4, speculative_model="/p"), None, M.PARD, 4),
        (DFlashDecodingConfig(max_draft_len=4, speculative_model="/p"), None, M.DFLASH, 4),
        (DSparkDecodingConfig(max_draft_len=4, speculative_model="/p"), None, M.DSPARK, 4),
        (MedusaDecodingConfig(num_medusa_heads=4, speculative_model="/m"), None, M.MEDUSA, 4),
        (MTPDecodingConfig(mtp_eagle_one_model=False), 1, M.MTP_EAGLE, 1),
        (MTPDecodingConfig(), 3, M.MTP, 3),
        (MTPDecodingConfig(use_mtp_vanilla=True), 1, M.MTP, 1),
    ],
)
def test_mode(config: DecodingBaseConfig, n_predict: int | None, mode: M, k: int) -> None:
    modules = None if n_predict is None else DraftInfo(method="mtp", n_predict=n_predict)
    spec_plan = plan_unchecked(config.to_speculative_config(), TARGET, modules)
    assert (spec_plan.mode, spec_plan.num_speculative_tokens) == (mode, k)


@pytest.mark.parametrize("cls", OWN)
def test_from_dict(cls: type[DecodingBaseConfig]) -> None:
    fields = {**REQUIRED.get(cls, {}), "max_draft_len": 3}
    for kind in (cls.decoding_type, cls.decoding_type.upper(), cls.decoding_type.replace("_", "")):
        assert decoding_config_from_dict({"decoding_type": kind, **fields}) == cls(**fields)


def test_eagle_means_eagle3(caplog: pytest.LogCaptureFixture) -> None:
    """A type's older name, which TensorRT-LLM reads so too."""
    assert decoding_config_from_dict({"decoding_type": "Eagle", "max_draft_len": 3}) == Eagle3DecodingConfig(
        max_draft_len=3
    )
    assert "decoding_type='Eagle' means Eagle3" in caplog.text


def test_from_dict_refuses_an_unknown_type() -> None:
    with pytest.raises(ConfigError, match=r"decoding_type='Lookahead' is unknown; use one of Eagle3, MTP"):
        read_speculative_config({"decoding_type": "Lookahead"})
