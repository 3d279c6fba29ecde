"""SpeculativeConfigs that are refused, alone or for a target and a draft, or not built yet: each with its message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.spec_plan_cases import DRAFTED, NGRAM, TARGET, decide, draft, modules, target
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.planning import plan_speculation
from trtspec.modes import SpeculativeDecodingMode as M

TREE = "[(0,),(1,),(0,0),(0,0,0)]"
SYNTHETIC: dict[str, Any] = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"method=None, model=None: set model to a draft checkpoint, or method='ngram'"),
        ({"num_speculative_tokens": 3}, r"num_speculative_tokens was provided but without speculative model\."),
        ({**DRAFTED, "model": None}, r"num_speculative_tokens was provided but without speculative model\."),
        ({"method": "eagle3"}, r"method='eagle3', model=None: set model"),
        ({**NGRAM, "model": "/x"}, r"model='/x' means nothing to method='ngram'; remove it"),
        (
            {"method": "ngram", "draft_len_schedule": {1: 3}},
            r"num_speculative_tokens=None and method='ngram' implies none; set it",
        ),
        (
            {"method": "draft_model", "model": "/x", "draft_confidence_threshold": 0.5},
            r"num_speculative_tokens=None and method='draft_model'",
        ),
        ({"method": "ngram", "max_total_draft_tokens": 5}, r"num_speculative_tokens=None and method='ngram'"),
        ({"method": "custom_class", "drafter": "m:C"}, r"num_speculative_tokens=None and method='custom_class'"),
        ({**DRAFTED, "prompt_lookup_latest": True}, r"prompt_lookup_latest=True means nothing to .*; remove it"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 9}, r"suffix_decoding_max_tree_depth=9 means nothing to .*remove"),
        ({**NGRAM, "capture_layers": (1,)}, r"capture_layers=\(1,\) means nothing to method='ngram'; remove it"),
        ({**NGRAM, "drafter": "m:C"}, r"drafter='m:C' means nothing to method='ngram'; remove it"),
        ({**NGRAM, "quantization": "int8"}, r"quantization='int8' means nothing to method='ngram'; remove it"),
        ({**NGRAM, "sa_config": {}}, r"sa_config=.* means nothing to method='ngram'; remove it"),
        ({**NGRAM, "vanilla": True}, r"vanilla=True means nothing to method='ngram'; remove it"),
        ({**NGRAM, "one_engine": True}, r"one_engine=True, .*method='ngram'; use one_engine=False"),
        (
            {**DRAFTED, "use_heterogeneous_vocab": True, "one_engine": True},
            r"use_heterogeneous_vocab=True with one_engine=True, parallel_drafting=False: .*; set one_engine=False",
        ),
        (
            {**NGRAM, "use_heterogeneous_vocab": True},
            r"use_heterogeneous_vocab=True means nothing to method='ngram'; remove it",
        ),
        (
            {**DRAFTED, "use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
            r"use_heterogeneous_vocab=True .*draft_sample_method='probabilistic'; leave .*unset, or use 'greedy'",
        ),
        (
            {"method": "auto", "draft_len_schedule": {4: 2}},
            r"\{4: 2\} does not fit num_speculative_tokens=3: .*use \{4: 3, ",
        ),
        (
            {**NGRAM, "speculative_token_tree": "[(0,)]"},
            r"'\[\(0,\)\]' is a chain of 1 tokens but num_speculative_tokens=3; make",
        ),
    ],
)
def test_refused_when_resolved(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_speculation(SpeculativeConfig(**fields), TARGET)


@pytest.mark.parametrize(
    ("fields", "target_changes", "draft_changes", "message"),
    [
        (
            {},
            {},
            {"vocab_size": 4000},
            r"vocab_size=4000 of the draft model='/models/draft' .*target's 4096; use a draft",
        ),
        (
            {"max_model_len": 2000},
            {},
            {"max_model_len": 4000},
            r"max_model_len=2000 exceeds the target's 1024; use at most",
        ),
        ({"max_model_len": 600}, {}, {}, r"max_model_len=600 exceeds the draft's 512; use at most 512"),
        (
            {},
            {},
            {"max_model_len": 3},
            r"max_model_len=3 of the draft is too short .*num_speculative_tokens=3; use a smaller K",
        ),
        ({}, {"max_model_len": 2}, {}, r"max_model_len=2 of the target is too short .*use a smaller K"),
        (
            {"max_model_len": 3},
            {},
            {},
            r"max_model_len=3 is too short to draft num_speculative_tokens=3; raise it above 3",
        ),
        (
            {"draft_tensor_parallel_size": 3},
            {"tensor_parallel_size": 4},
            {},
            r"=3 is neither 1 nor the target's 4; use one",
        ),
        ({}, {}, {"n_predict": 2}, r"num_speculative_tokens=3 must be divisible by n_predict=2 .*; use 2"),
        ({"method": "mtp", "model": None}, {}, modules(2), r"=3 must be divisible by n_predict=2 .*; use 2"),
        (
            {"method": "mtp", "model": None, "vanilla": True},
            {},
            modules(2),
            r"=3 with n_predict=2: .* at most 2, or vanilla=False",
        ),
        (
            {"method": "mtp", "model": None, "vanilla": True},
            {},
            modules(1),
            r"=3 with n_predict=1: .* at most 1, or vanilla=False",
        ),
        (
            {"method": "mtp", "model": None, "one_engine": False},
            {},
            modules(2),
            r"=3 must be divisible by n_predict=2",
        ),
        (
            {"method": "mtp", "model": None, "num_speculative_tokens": None},
            {},
            None,
            r"num_speculative_tokens=None and",
        ),
        (
            {"method": "mtp", "vanilla": True, "one_engine": False},
            {},
            None,
            r"one_engine=False, vanilla=True does not exist",
        ),
        (
            {"method": "eagle3"},
            {"model_type": "mamba"},
            None,
            r"model_type='mamba'; use a target of llama, qwen2, qwen3$",
        ),
        (
            {"method": "eagle3"},
            {"num_hidden_layers": 4},
            None,
            r"num_hidden_layers=4 is too few .*; set capture_layers",
        ),
        (
            {"method": "eagle3", "capture_layers": (8,)},
            {},
            None,
            r"capture_layers=\(8,\) .*8 layers; use ids in \[-1, 7\]",
        ),
    ],
)
def test_refused_against_target_or_draft(
    fields: dict[str, Any], target_changes: dict[str, Any], draft_changes: dict[str, Any] | None, message: str
) -> None:
    config = SpeculativeConfig(**{**DRAFTED, **fields})
    info = None if draft_changes is None else draft(**draft_changes)
    with pytest.raises(ConfigError, match=message):
        plan_speculation(config, target(**target_changes), info)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"code_revision": "main"}, r"code_revision='main' is not built yet; .*leave it unset"),
        ({"quantization": "fp8"}, r"quantization='fp8': the draft's weights are floating-point, .*leave it unset"),
        ({"draft_tensor_parallel_size": 2}, r"draft_tensor_parallel_size=2 is not built yet; use 1"),
        (
            {"rejection_sample_method": "standard"},
            r"rejection_sample_method='standard' is not built yet; leave it unset",
        ),
        ({"rejection_sample_method": "block"}, r"rejection_sample_method='block' is not built yet"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 2.0}, r"rejection_sample_method='synthetic' is not built yet"),
        (
            {"draft_sample_method": "probabilistic"},
            r"draft_sample_method='probabilistic' is not built yet; leave it unset",
        ),
        (
            {"enable_adaptive_verification": True, "draft_confidence_threshold": 0.5, "one_engine": True},
            r"=0.5 with enable_adaptive_verification=True is not built yet; leave .* unset, or leave enable_adaptive_",
        ),
        (
            {"method": "custom_class", "model": None, "drafter": "a:B", "enable_adaptive_verification": True},
            "enable_adaptive_verification=True with method='custom_class' is not built; leave enable_adaptive_verif",
        ),
        (
            {"acceptance_window": 8, "acceptance_length_threshold": 1.0},
            r"acceptance_window=8 is not built yet; leave it",
        ),
        (
            {**NGRAM, "model": None, "speculative_token_tree": TREE},
            r"speculative_token_tree='\[\(0,\),.* a draft tree, which mode=NGRAM does not take yet; use one of",
        ),
        (
            {"sa_config": {"enable_global_pool": True}},
            r"sa_config\.enable_global_pool=True: lookups in the texts of other requests are not built",
        ),
        ({"speculative_token_tree": TREE, "sa_config": {}}, "sa_config with a draft tree, .* is not built yet; leave"),
        (
            {"speculative_token_tree": TREE, "use_heterogeneous_vocab": True},
            r"use_heterogeneous_vocab=True with a draft tree, spec.*_token_tree=.* not built yet; leave the tree unset",
        ),
    ],
)
def test_known_but_not_built(fields: dict[str, Any], message: str) -> None:
    config = SpeculativeConfig(**{**DRAFTED, **fields})
    with pytest.raises(UnsupportedError, match=message):
        plan_speculation(config, target(tensor_parallel_size=2) if "draft_tensor_parallel_size" in fields else TARGET)


def test_the_targets_tensor_parallelism_is_inherited_and_not_built() -> None:
    with pytest.raises(
        UnsupportedError, match=r"draft_tensor_parallel_size=2 \(the target's\) is not built yet; use 1"
    ):
        decide(DRAFTED, tensor_parallel_size=2)
    assert decide({**DRAFTED, "draft_tensor_parallel_size": 1}, tensor_parallel_size=2).draft_tensor_parallel_size == 1
    assert decide(NGRAM, tensor_parallel_size=2).mode is M.NGRAM  # no draft model to split
