"""SpeculativeConfig: fields, defaults, and the rules that need neither target nor draft."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from trtspec.config.speculation_plan import TargetInfo
from trtspec.config.speculative import LEGACY_MTP_METHODS, SpeculativeConfig
from trtspec.errors import ConfigError
from trtspec.interop.decoding_configs import NGramDecodingConfig
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import plan_speculation

TARGET = TargetInfo(
    model="/models/target",
    model_type="llama",
    vocab_size=4096,
    max_model_len=1024,
    num_hidden_layers=8,
    max_batch_size=8,
)
DRAFTED: dict[str, Any] = {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}


def words(text: str) -> list[str]:
    return text.split()


def test_defaults() -> None:
    assert SpeculativeConfig().model_dump() == {
        **dict.fromkeys(
            words(
                "num_speculative_tokens model method one_engine revision code_revision quantization "
                "enforce_eager draft_tensor_parallel_size max_model_len disable_by_batch_size draft_len_schedule "
                "num_speculative_tokens_per_batch_size max_concurrency acceptance_window "
                "acceptance_length_threshold prompt_lookup_min prompt_lookup_max rejection_sample_method "
                "synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method is_public_pool sa_config "
                "speculative_token_tree capture_layers output_directory drafter draft_confidence_threshold "
                "max_total_draft_tokens dynamic_tree_max_topK"
            )
        ),
        **dict.fromkeys(
            words(
                "vanilla disable_padded_drafter_batch prompt_lookup_latest use_heterogeneous_vocab "
                "parallel_drafting enable_adaptive_verification"
            ),
            False,
        ),
        "disable_logprobs": False,
        "is_keep_all": True,
        "ngram_pool_size": 200_000,
        "write_interval": 20,
        "file_prefix": "data",
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }


SYNTHETIC = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0: .*equal to 1 .*leave speculative_config unset"),
        ({"num_speculative_tokens": -2}, r"num_speculative_tokens=-2: .*equal to 1"),
        ({"num_speculative_tokens": True}, r"num_speculative_tokens=True: .*valid integer"),
        ({"num_speculative_tokens": "3"}, r"num_speculative_tokens='3': .*valid integer"),
        ({"num_speculative_tokens": "most"}, r"num_speculative_tokens='most': .*valid integer .*'auto': as many as"),
        (
            {"max_total_draft_tokens": 4, "speculative_token_tree": "[(0,)]"},
            r"has one shape, and a tree of max_total_draft_tokens=4 nodes has many; leave one of them unset",
        ),
        ({"dynamic_tree_max_topK": 4}, r"dynamic_tree_max_topK=4 is of .*; set max_total_draft_tokens"),
        (
            {"num_speculative_tokens": "auto", "speculative_token_tree": "[(0,)]"},
            r"speculative_token_tree='\[\(0,\)\]' has one size, .*'auto' has none; leave one of them unset",
        ),
        (
            {"enable_adaptive_verification": True, "speculative_token_tree": "[(0,)]"},
            r"speculative_token_tree='\[\(0,\)\]' has one size, .*=True has many; leave one of them unset",
        ),
        ({"num_spec_tokens": 3}, r"num_spec_tokens=3: unknown field; did you mean 'num_speculative_tokens'"),
        ({"zzz": 3}, r"zzz=3: unknown field; known fields: .*model"),
        ({"method": "guess"}, r"method='guess' is unknown; use one of .*ngram"),
        ({"draft_tensor_parallel_size": 0}, r"draft_tensor_parallel_size=0: .*equal to 1 \(1, or the target's"),
        ({"max_model_len": 0}, r"max_model_len=0: .*equal to 1 \(tokens"),
        ({"disable_by_batch_size": 1}, r"disable_by_batch_size=1: .*equal to 2"),
        ({"prompt_lookup_min": 0}, r"prompt_lookup_min=0: .*equal to 1 \(shortest"),
        ({"prompt_lookup_max": 0}, r"prompt_lookup_max=0: .*equal to 1 \(longest"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, r"prompt_lookup_min=4 .*prompt_lookup_max=2; lower it to"),
        ({"ngram_pool_size": 0}, r"ngram_pool_size=0: .*equal to 1 \(matches in a pool"),
        ({"suffix_decoding_max_tree_depth": 0}, r"max_tree_depth=0: .*equal to 1"),
        ({"suffix_decoding_max_cached_requests": -1}, r"max_cached_requests=-1: .*equal to 0"),
        ({"suffix_decoding_max_spec_factor": -0.5}, r"max_spec_factor=-0.5: .*equal to 0"),
        ({"suffix_decoding_min_token_prob": 1.1}, r"min_token_prob=1.1: .*equal to 1"),
        ({"suffix_decoding_min_token_prob": float("nan")}, r"min_token_prob=nan: .*finite"),
        ({"max_concurrency": 0}, r"max_concurrency=0: .*equal to 1"),
        (
            {"acceptance_window": 8},
            r"acceptance_window=8 and acceptance_length_threshold=None belong together; set both",
        ),
        ({"acceptance_length_threshold": 1.0}, r"acceptance_length_threshold=1.0 belong together; set both"),
        ({"rejection_sample_method": "hope"}, r"rejection_sample_method='hope' is unknown; use one of strict"),
        ({"draft_sample_method": "hope"}, r"draft_sample_method='hope' is unknown; use one of greedy"),
        (SYNTHETIC, r"rates=None, .*length=None with rejection_sample_method='synthetic': set exactly one"),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5},
            r"rates=\(0.5,\), .*length=1.5 .*: set exactly one",
        ),
        ({"synthetic_acceptance_length": 1.5}, r"length=1.5 with rejection_sample_method=None: .*neither otherwise"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6]}, r"rates=\(0.5, 0.6\) increase; each must"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5]}, r"rates.0=1.5: .*equal to 1"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, r"length=0.5: .*equal to 1 \(in \[1, K\+1\]"),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.8], "num_speculative_tokens": 3},
            r"rates=\(0.9, 0.8\) needs num_speculative_tokens=3 entries; give 3",
        ),
        (
            {**SYNTHETIC, "synthetic_acceptance_length": 4.5, "num_speculative_tokens": 3},
            r"synthetic_acceptance_length=4.5 exceeds K\+1; use a value in \[1, 4\]",
        ),
        ({"speculative_token_tree": "(0,"}, r"speculative_token_tree='\(0,' cannot be read; use a list of paths"),
        ({"speculative_token_tree": "5"}, r"speculative_token_tree='5' cannot be read; use a list"),
        ({"speculative_token_tree": "[]"}, r"speculative_token_tree='\[\]' is not a tree; use a list"),
        ({"speculative_token_tree": "[(0,0)]"}, r"'\[\(0,0\)\]' is not a tree; .*parents are listed too"),
        ({"speculative_token_tree": "[(0,),(0,)]"}, r"is not a tree"),
        ({"speculative_token_tree": "[(-1,)]"}, r"is not a tree"),
        ({"speculative_token_tree": "[([0],)]"}, r"'\[\(\[0\],\)\]' cannot be read; use a list of paths"),
        ({"draft_len_schedule": {}}, r"draft_len_schedule=\{\}: use \{batch size >= 1"),
        ({"draft_len_schedule": {0: 3}}, r"draft_len_schedule=\{0: 3\}: use"),
        ({"draft_len_schedule": {4: -1}}, r"draft_len_schedule=\{4: -1\}: use .*draft length >= 0"),
        ({"draft_len_schedule": {4: 2}, "num_speculative_tokens": 3}, r"=\{4: 2\} does not fit .*=3: .*use \{4: 3, "),
        ({"draft_len_schedule": {2: 3, 4: 5}, "num_speculative_tokens": 3}, r"does not fit num_speculative_tokens=3"),
        (
            {"draft_len_schedule": {4: 3}, "max_concurrency": 2},
            r"draft_len_schedule=\{4: 3\} and max_concurrency=2 exclude each other; keep one",
        ),
        ({"num_speculative_tokens_per_batch_size": []}, r"per_batch_size=\[\] is empty; leave it unset"),
        ({"num_speculative_tokens_per_batch_size": [(2, 4, 3)]}, r"\(2, 4, 3\) is out of place; use .*start at 1"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 3), (4, 8, 1)]}, r"\(4, 8, 1\) is out of place; .*disjoint"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 3), (9, 8, 1)]}, r"\(9, 8, 1\) is out of place"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, -1)]}, r"\(1, 4, -1\) is out of place; .*K >= 0"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4)]}, r"per_batch_size.0.2=\(1, 4\): field required"),
        ({"capture_layers": [-2]}, r"capture_layers.0=-2: .*equal to -1"),
        ({"method": "custom_class"}, r"drafter=None with method='custom_class'; set drafter='module:Class'"),
    ],
)
def test_refused_when_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**fields)
    with pytest.raises(ConfigError, match=message):
        read_speculative_config(fields)
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_lookup_min": 2, "prompt_lookup_max": 2},
        {"disable_by_batch_size": 2},
        {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.5, 0.0], "num_speculative_tokens": 3},
        {**SYNTHETIC, "synthetic_acceptance_length": 4.0, "num_speculative_tokens": 3},
        {**SYNTHETIC, "synthetic_acceptance_length": 1.0},
        {
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 0,
            "suffix_decoding_min_token_prob": 1,
        },
        {"num_speculative_tokens_per_batch_size": [(1, 1, 0), (2, 2, 9)]},
        {"draft_len_schedule": {1: 3, 2: 0}, "num_speculative_tokens": 3},
    ],
)
def test_bounds_are_inclusive(fields: dict[str, Any]) -> None:
    assert SpeculativeConfig(**fields).model_fields_set == set(fields)


def test_several_errors_are_told_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"prompt_lookup_min=0.*; .*max_model_len=0|max_model_len=0.*; .*prompt_lookup"
    ):
        SpeculativeConfig(prompt_lookup_min=0, max_model_len=0)


def test_frozen() -> None:
    config = SpeculativeConfig(**NGRAM)
    with pytest.raises(ConfigError, match="num_speculative_tokens=9: configs are frozen; build a new one"):
        config.num_speculative_tokens = 9  # type: ignore[misc]
    spec_plan = plan_speculation(config, TARGET)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec_plan.model = "x"  # type: ignore[misc]


def test_resolve_does_not_change_the_config() -> None:
    config = SpeculativeConfig(method="auto")
    before = config.model_dump()
    plan_speculation(config, TARGET)
    assert config.model_dump() == before


@pytest.mark.parametrize("name", LEGACY_MTP_METHODS)
def test_legacy_mtp_names(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"method='{name}' is deprecated; use method='mtp'"):
        assert SpeculativeConfig(method=name).method == "mtp"


def test_json() -> None:
    text = '{"draft_len_schedule": {"8": 1, "4": 3}, "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}'
    config = SpeculativeConfig.model_validate_json(text)
    assert config.draft_len_schedule == {4: 3, 8: 1}
    assert config.num_speculative_tokens_per_batch_size == ((1, 2, 3),)
    with pytest.raises(ConfigError, match="max_model_len=0"):
        SpeculativeConfig.model_validate_json('{"max_model_len": 0}')


def test_from_any() -> None:
    config = SpeculativeConfig(**NGRAM)
    assert read_speculative_config(None) is None
    assert read_speculative_config(config) is config
    assert read_speculative_config(NGRAM) == config
    converted = read_speculative_config(NGramDecodingConfig(max_draft_len=3))
    assert converted is not None
    assert converted == read_speculative_config({"decoding_type": "ngram", "max_draft_len": 3})
    with pytest.raises(ConfigError, match=r"speculative_config=3 is a int; use None, a dict"):
        read_speculative_config(3)


def test_repr() -> None:
    assert repr(SpeculativeConfig(**NGRAM)) == "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)"
    assert repr(SpeculativeConfig(method="ngram", model="ngram", num_speculative_tokens=3)) == repr(
        SpeculativeConfig(**NGRAM)
    )
    expected = "SpeculativeConfig(method='draft_model', model='/models/draft', num_spec_tokens=3)"
    assert str(SpeculativeConfig(**DRAFTED)) == expected


def test_pickles() -> None:
    config = SpeculativeConfig(**DRAFTED)
    assert pickle.loads(pickle.dumps(config)) == config
