"""The plan of a SpeculativeConfig for a target and a draft, method by method."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest

from tests.unit.spec_plan_cases import DRAFT, DRAFTED, NGRAM, TARGET, decide, draft, modules, target
from trtspec.config.speculation_plan import DraftInfo, draft_len_for_batch, scheduled_draft_lens
from trtspec.config.speculative import SpeculativeConfig
from trtspec.config.tree import parse_tree
from trtspec.errors import ConfigError
from trtspec.methods.capture import capture_layers_from_vllm, default_capture_layers
from trtspec.methods.mtp.checkpoint import MTP_TARGETS, mtp_layers
from trtspec.methods.planning import _draft_tp, plan_speculation, plan_unchecked
from trtspec.methods.table import METHODS
from trtspec.modes import SpeculativeDecodingMode as M


def words(text: str) -> list[str]:
    return text.split()


def test_draft_model() -> None:
    spec_plan = plan_speculation(SpeculativeConfig(**DRAFTED), TARGET, DRAFT)
    assert spec_plan.mode is M.DRAFT_TARGET
    assert (spec_plan.method, spec_plan.model) == ("draft_model", "/models/draft")
    assert spec_plan.max_model_len == 512  # the smaller of the two
    assert spec_plan.num_speculative_tokens == spec_plan.num_lookahead_slots == 3
    assert spec_plan.num_extra_kv_tokens == 2
    assert spec_plan.speculative_token_tree == ((0,), (0, 0), (0, 0, 0))
    assert plan_speculation(SpeculativeConfig(**DRAFTED, max_model_len=100), TARGET, DRAFT).max_model_len == 100
    assert plan_speculation(SpeculativeConfig(**DRAFTED), TARGET).max_model_len == 1024  # nothing is known of the draft


@pytest.mark.parametrize("how", [None, "greedy"])
def test_a_draft_model_of_another_vocabulary(how: str | None) -> None:
    other = dataclasses.replace(DRAFT, vocab_size=DRAFT.vocab_size + 7)
    fields = {**DRAFTED, "draft_sample_method": how}
    with pytest.raises(ConfigError, match=r"differs from the target's .*, or set use_heterogeneous_vocab=True"):
        plan_speculation(SpeculativeConfig(**fields), TARGET, other)
    spec_plan = plan_speculation(SpeculativeConfig(**fields, use_heterogeneous_vocab=True), TARGET, other)
    assert spec_plan.mode is M.DRAFT_TARGET


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 3}, (2, 3)),
    ],
)
def test_prompt_lookup(fields: dict[str, Any], expected: tuple[int, int]) -> None:
    spec_plan = decide({**NGRAM, **fields})
    options = spec_plan.options
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == expected
    assert options.prompt_lookup_latest is False
    assert options.is_public_pool is None


def test_ngram_pool() -> None:
    options = decide({**NGRAM, "is_public_pool": False, "is_keep_all": False, "ngram_pool_size": 7}).options
    assert (options.is_public_pool, options.is_keep_all, options.ngram_pool_size) == (False, False, 7)
    for field, value in (("is_keep_all", False), ("ngram_pool_size", 7)):
        with pytest.raises(ConfigError, match=f"{field}={value} without a pool; set is_public_pool to True or False"):
            SpeculativeConfig(**NGRAM, **{field: value})
    with pytest.raises(ConfigError, match="is_public_pool=True means nothing to method='suffix'; remove it"):
        decide({"method": "suffix", "is_public_pool": True})


def test_suffix() -> None:
    spec_plan = decide({"method": "suffix"})
    assert (spec_plan.mode, spec_plan.num_speculative_tokens) == (M.SUFFIX, 24)
    own = {"max_tree_depth": 8, "max_cached_requests": 0, "max_spec_factor": 2.0, "min_token_prob": 0.5}
    settings = {f"suffix_decoding_{name}": value for name, value in own.items()}
    spec_plan = decide({"method": "suffix", **settings})
    assert {name: getattr(spec_plan.options, name) for name in settings} == settings


@pytest.mark.parametrize(("batch", "k", "n"), [(1, 5, 3), (4, 5, 3), (5, 3, 5), (256, 3, 5)])
def test_auto(batch: int, k: int, n: int) -> None:
    spec_plan = decide({"method": "auto"}, max_batch_size=batch)
    assert (spec_plan.mode, spec_plan.method) == (M.NGRAM, "ngram")
    assert (spec_plan.num_speculative_tokens, spec_plan.options.prompt_lookup_max, spec_plan.max_concurrency) == (
        k,
        n,
        32,
    )


def test_auto_fills_only_what_is_unset() -> None:
    fields = {"method": "auto", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "max_concurrency": 7}
    spec_plan = decide(fields)
    assert (spec_plan.num_speculative_tokens, spec_plan.options.prompt_lookup_max, spec_plan.max_concurrency) == (
        2,
        4,
        7,
    )
    assert decide({"method": "auto", "draft_len_schedule": {8: 3}}).max_concurrency is None


def test_custom_class_takes_any_drafter() -> None:
    drafter = object()
    spec_plan = decide({"method": "custom_class", "drafter": drafter, "num_speculative_tokens": 2})
    assert spec_plan.mode is M.USER_PROVIDED
    assert spec_plan.options.drafter is drafter


def test_explicit_strict_and_greedy_run() -> None:
    fields = {**DRAFTED, "rejection_sample_method": "strict", "draft_sample_method": "greedy", "enforce_eager": True}
    spec_plan = decide(fields)
    assert (spec_plan.draft_sample_method, spec_plan.enforce_eager) == ("greedy", True)


@pytest.mark.parametrize(
    ("fields", "n_predict", "mode", "k"),
    [
        ({}, 1, M.MTP_EAGLE_ONE_MODEL, 1),
        ({"one_engine": False}, 1, M.MTP_EAGLE, 1),
        ({"vanilla": True}, 1, M.MTP, 1),
        ({}, 3, M.MTP, 3),  # several modules: one per draft
        ({"num_speculative_tokens": 2}, 3, M.MTP, 2),
        ({"num_speculative_tokens": 6, "one_engine": False}, 3, M.MTP_EAGLE, 6),
        ({"num_speculative_tokens": 6}, 3, M.MTP_EAGLE_ONE_MODEL, 6),  # more drafts than modules: these run again
        ({"num_speculative_tokens": 4, "one_engine": True}, 2, M.MTP_EAGLE_ONE_MODEL, 4),
    ],
)
@pytest.mark.filterwarnings("ignore:.*runs (one MTP layer|each of)")
def test_mtp(fields: dict[str, Any], n_predict: int, mode: M, k: int) -> None:
    config = SpeculativeConfig(method="mtp", **fields)
    spec_plan = plan_unchecked(config, target(quantization="fp8"), DraftInfo(**modules(n_predict)))
    assert (spec_plan.mode, spec_plan.num_speculative_tokens) == (mode, k)
    assert (spec_plan.model, spec_plan.quantization, spec_plan.capture_layers) == (TARGET.model, "fp8", (-1,))


@pytest.mark.parametrize(("model_type", "layers"), [("mimo", (7,)), ("deepseek_v3", (-1,))])
def test_mtp_of_mimo_reads_states_before_the_norm(model_type: str, layers: tuple[int, ...]) -> None:
    spec_plan = plan_unchecked(SpeculativeConfig(method="mtp"), target(model_type=model_type), DraftInfo(**modules(1)))
    assert spec_plan.capture_layers == layers


def test_mtp_warns_when_one_layer_runs_several_times() -> None:
    with pytest.warns(UserWarning, match="num_speculative_tokens=3 runs one MTP layer 3 times"):
        plan_unchecked(SpeculativeConfig(method="mtp", num_speculative_tokens=3), TARGET, DraftInfo(**modules(1)))
    with pytest.warns(UserWarning, match="num_speculative_tokens=6 runs each of 3 MTP layers 2 times"):
        plan_unchecked(SpeculativeConfig(method="mtp", num_speculative_tokens=6), TARGET, DraftInfo(**modules(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_unchecked(SpeculativeConfig(method="mtp", num_speculative_tokens=1), TARGET, DraftInfo(**modules(1)))


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator"])
def test_heads_that_read_the_last_state(kind: str) -> None:
    """Each head drafts one token, once.

    config.json of such heads says nothing of lengths, and is believed before a folder's name.
    """
    head = DraftInfo(method=kind, n_predict=4)
    for fields, k in (({}, 4), ({"num_speculative_tokens": 3}, 3), ({"method": kind, "quantization": "int8"}, 4)):
        spec_plan = plan_speculation(SpeculativeConfig(model="/x/eagle-3", **fields), TARGET, head)
        assert (spec_plan.mode, spec_plan.num_speculative_tokens) == (M.from_string(kind), k)
        assert (spec_plan.capture_layers, spec_plan.max_model_len) == ((-1,), TARGET.max_model_len)
    for k in (5, 8):  # 8 = 2 * 4, which MTP layers could draft
        with pytest.raises(ConfigError, match=rf"num_speculative_tokens={k} exceeds the 4 heads .*; use at most 4"):
            plan_speculation(SpeculativeConfig(model="/x", num_speculative_tokens=k), TARGET, head)
    with pytest.raises(ConfigError, match=r"capture_layers=\(1,\) means nothing to method="):
        plan_speculation(SpeculativeConfig(model="/x", capture_layers=(1,)), TARGET, head)


def test_k_that_a_method_or_a_checkpoint_implies() -> None:
    suffix = SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=7)
    assert plan_unchecked(SpeculativeConfig(method="suffix"), TARGET).num_speculative_tokens == 24
    assert plan_unchecked(suffix, TARGET).num_speculative_tokens == 7
    saved = SpeculativeConfig(method="extract_hidden_states", output_directory="/o")
    assert plan_unchecked(saved, TARGET).num_speculative_tokens == 1
    head = DraftInfo(method="mlp_speculator", n_predict=4)
    assert plan_unchecked(SpeculativeConfig(model="/x"), TARGET, head).num_speculative_tokens == 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, 1),
        ({"model_type": "deepseek_v3"}, None),
        ({"model_type": "longcat_flash"}, 1),
        ({"model_type": "qwen3_5", "mtp_num_hidden_layers": 2}, 2),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 0}, None),
    ],
)
def test_mtp_layers(config: dict[str, Any], expected: int | None) -> None:
    assert mtp_layers(config) == expected


def test_mtp_table_is_complete() -> None:
    assert {row.architecture for row in MTP_TARGETS.values()} == set(
        words(
            "DeepSeekMTPModel MiMoMTPModel Glm4MoeMTPModel ErnieMTPModel Qwen3NextMTP LongCatFlashMTPModel "
            "OpenPanguMTPModel Step3p5MTP Gemma4MTPModel Qwen3_5MTP"
        )
    )


@pytest.mark.parametrize("n", [6, 8, 28, 32, 61, 80])
def test_capture_layers_mean_the_same_upstream(n: int) -> None:
    assert default_capture_layers(n) == (1, n // 2 - 1, n - 4)  # TensorRT-LLM
    assert capture_layers_from_vllm((2, n // 2, n - 3)) == default_capture_layers(n)


def test_capture_layers_edges() -> None:
    assert default_capture_layers(1) == (0,)
    with pytest.raises(ConfigError, match=r"ids \(0, 3\): 0 is the embedding.*; use ids >= 1"):
        capture_layers_from_vllm((0, 3))


def test_hidden_states_need_a_folder_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match="output_directory=None with method='extract_hidden_states'; set it"):
        SpeculativeConfig(method="extract_hidden_states")
    spec_plan = plan_speculation(SpeculativeConfig(method="extract_hidden_states", output_directory="/o"), TARGET)
    assert spec_plan.mode.is_save_hidden_states()
    options = spec_plan.options
    assert (options.output_directory, options.write_interval, options.file_prefix) == ("/o", 20, "data")
    assert spec_plan.capture_layers == (1, 3, 4)
    with pytest.raises(ConfigError, match="output_directory='/o' means nothing to method='ngram'; remove it"):
        plan_speculation(SpeculativeConfig(**NGRAM, output_directory="/o"), TARGET)
    with pytest.raises(ConfigError, match=r"file_prefix='a/b': use letters"):
        SpeculativeConfig(method="extract_hidden_states", output_directory="/o", file_prefix="a/b")


def test_parallel_drafts_guess_at_a_mask_token() -> None:
    fields = {**DRAFTED, "parallel_drafting": True}
    config = SpeculativeConfig(**fields)
    spec_plan = plan_speculation(config, TARGET, draft(mask_token_id=4095))
    assert (spec_plan.mode, spec_plan.mask_token_id) == (M.PARD, 4095)
    assert plan_speculation(config, TARGET, draft(mask_token_id=4)).mask_token_id == 4
    assert plan_speculation(config, TARGET).mask_token_id is None  # nothing is known of the draft
    chain = plan_speculation(SpeculativeConfig(**DRAFTED), TARGET, draft(mask_token_id=4))
    assert (chain.mode, chain.mask_token_id) == (M.DRAFT_TARGET, None)
    with pytest.raises(ConfigError, match=r"none of pard_token, mask_token_id, ptd_token_id, .* leave parallel"):
        plan_speculation(config, TARGET, DRAFT)
    for mask in (4096, -1):
        with pytest.raises(ConfigError, match=rf"mask token {mask} is not in its vocabulary of 4096 ids; correct"):
            plan_speculation(config, TARGET, draft(mask_token_id=mask))
    with pytest.raises(
        ConfigError,
        match=r"with one_engine=None, parallel_drafting=True: .*; set one_engine=False",
    ):
        plan_speculation(SpeculativeConfig(**fields, use_heterogeneous_vocab=True), TARGET, draft(mask_token_id=4))
    with pytest.raises(ConfigError, match=r"does not exist for method='medusa'; .* draft_model, dspark, eagle3"):
        plan_speculation(
            SpeculativeConfig(method="medusa", model="/m", parallel_drafting=True), TARGET, draft(n_predict=3)
        )


def test_a_dflash_draft_says_almost_everything() -> None:
    found = draft(method="dflash", n_predict=7, capture_layers=(1, 5), mask_token_id=9)
    for fields in ({"method": "dflash"}, {"method": "dflash", "parallel_drafting": True}, {}):
        spec_plan = plan_speculation(SpeculativeConfig(model="/d", **fields), TARGET, found)
        assert (spec_plan.mode, spec_plan.method, spec_plan.num_speculative_tokens) == (M.DFLASH, "dflash", 7)
        assert (spec_plan.capture_layers, spec_plan.mask_token_id) == ((1, 5), 9)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=8 exceeds the 7 masks .* use at most 7"):
        plan_speculation(SpeculativeConfig(model="/d", method="dflash", num_speculative_tokens=8), TARGET, found)
    with pytest.raises(ConfigError, match=r"mode=DFLASH: config.json of the draft has none of"):
        plan_speculation(SpeculativeConfig(model="/d"), TARGET, dataclasses.replace(found, mask_token_id=None))


def test_capture_layers_plan_speculation() -> None:
    fields = {"method": "eagle3", "model": "/e", "num_speculative_tokens": 3}
    assert plan_unchecked(SpeculativeConfig(**fields), TARGET).capture_layers == (1, 3, 4)
    assert plan_unchecked(SpeculativeConfig(**fields, capture_layers=[0, -1]), TARGET).capture_layers == (0, -1)
    assert plan_unchecked(SpeculativeConfig(**DRAFTED), TARGET).capture_layers == ()
    eagle = {**fields, "method": "eagle"}
    assert plan_unchecked(SpeculativeConfig(**eagle), TARGET, draft(capture_layers=(1, 2))).capture_layers == (-1,)


def test_tree_is_sorted_by_length_then_path() -> None:
    assert parse_tree("[(0,1), (1,), (0,0), (0,), (1,0), (1,1)]") == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))


def test_a_chain_that_is_written_as_a_tree_is_that_chain() -> None:
    """The plans are equal, so the graphs and the time of a step are too."""
    written = decide({**NGRAM, "speculative_token_tree": "[(0,0,0),(0,),(0,0)]"})
    assert written.tree is None
    assert written == decide({**NGRAM, "num_speculative_tokens": 3})


def test_an_mlp_speculator_runs_on_one_rank() -> None:
    config = SpeculativeConfig(method="mlp_speculator", model="/x", num_speculative_tokens=3)
    with pytest.warns(UserWarning, match="draft_tensor_parallel_size"):
        assert _draft_tp(config, METHODS["mlp_speculator"], target(tensor_parallel_size=2)) == 1


@pytest.mark.parametrize(
    ("fields", "known", "most"),
    [
        (NGRAM, None, 5),
        ({"method": "suffix"}, None, 8),
        ({"method": "eagle3", "model": "/h"}, draft(method="eagle3"), 5),
        ({"method": "medusa", "model": "/h"}, draft(method="medusa", n_predict=4), 4),  # one for each head
        ({"method": "mtp"}, draft(**modules(1)), 5),
        ({"method": "mtp"}, draft(**modules(2)), 4),  # each module twice
        ({"method": "mtp", "vanilla": True}, draft(**modules(7)), 7),
        ({"method": "mtp", "vanilla": True}, draft(**modules(2)), 2),
        ({"method": "medusa", "model": "/h"}, draft(method="medusa", n_predict=9), 5),
        ({**DRAFTED, "one_engine": True}, DRAFT, 5),
    ],
)
def test_auto_makes_and_verifies_up_to_a_number_that_the_method_gives(
    fields: dict[str, Any], known: DraftInfo | None, most: int
) -> None:
    config = SpeculativeConfig(**{**fields, "num_speculative_tokens": "auto"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MTP modules that run several times
        spec_plan = plan_speculation(config, target(model_type="mimo" if fields["method"] == "mtp" else "llama"), known)
    assert (spec_plan.num_speculative_tokens, spec_plan.chooses_draft_len) == (most, True)
    assert scheduled_draft_lens(spec_plan) == {0, most, *(length for length in (1, 3) if length < most)}
    assert not decide(NGRAM).chooses_draft_len


@pytest.mark.parametrize(("last", "lengths"), [(8, {3}), (7, {0, 3})])
def test_batches_past_a_schedule_have_graphs_without_drafts(last: int, lengths: set[int]) -> None:
    spec_plan = decide({**NGRAM, "draft_len_schedule": {last: 3}}, max_batch_size=8)
    assert scheduled_draft_lens(spec_plan) == lengths == {draft_len_for_batch(spec_plan, batch) for batch in (1, 8)}


@pytest.mark.parametrize(
    ("fields", "known", "chosen"),
    [
        ({"method": "ngram"}, None, 5),
        ({"method": "eagle3", "model": "/h"}, draft(method="eagle3"), 5),
        ({"method": "draft_model", "model": "/d", "one_engine": True}, DRAFT, 5),
        ({"method": "ngram", "disable_by_batch_size": 4}, None, 5),
        ({"method": "suffix"}, None, None),  # these imply a number
        ({"method": "grammar"}, None, None),
        ({"method": "medusa", "model": "/h"}, draft(method="medusa", n_predict=4), None),
        ({"method": "auto"}, None, None),
        ({"method": "eagle3", "model": "/h", "speculative_token_tree": "[(0,), (1,)]"}, draft(method="eagle3"), None),
    ],
)
def test_the_engine_chooses_where_nothing_says_a_number(
    fields: dict[str, Any], known: DraftInfo | None, chosen: int | None
) -> None:
    spec_plan = plan_speculation(SpeculativeConfig(**fields), target(), known)
    assert spec_plan.chooses_draft_len == (chosen is not None)
    if chosen is not None:
        assert spec_plan.num_speculative_tokens == chosen


@pytest.mark.parametrize(
    ("fields", "known", "most"),
    [
        ({"method": "eagle3", "model": "/h", "num_speculative_tokens": 4}, draft(method="eagle3"), 4),
        ({"method": "eagle3", "model": "/h"}, draft(method="eagle3"), 5),  # as with "auto"
        ({"method": "medusa", "model": "/h"}, draft(method="medusa", n_predict=7), 7),  # what the checkpoint implies
        ({"method": "suffix"}, None, 24),
        ({**NGRAM, "num_speculative_tokens": 2}, None, 2),
    ],
)
def test_adaptive_verification_chooses_up_to_the_number(
    fields: dict[str, Any], known: DraftInfo | None, most: int
) -> None:
    config = SpeculativeConfig(**fields, enable_adaptive_verification=True)
    spec_plan = plan_speculation(config, target(), known)
    assert (spec_plan.num_speculative_tokens, spec_plan.chooses_draft_len) == (most, True)
    assert scheduled_draft_lens(spec_plan) == {0, most, *(length for length in (1, 3) if length < most)}


def test_auto_stays_within_a_schedule() -> None:
    spec_plan = decide({**NGRAM, "num_speculative_tokens": "auto", "draft_len_schedule": {2: 5, 4: 2}})
    assert [draft_len_for_batch(spec_plan, size) for size in (2, 4, 5)] == [5, 2, 0]
    assert scheduled_draft_lens(spec_plan) == {0, 1, 2, 3, 5}
