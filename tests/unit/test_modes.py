"""Every predicate of every mode against a table written by hand.

Also the words that name a mode, and the rows that say what each method is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import pytest

from tests.unit import spec_plan_cases
from trtspec.errors import ConfigError
from trtspec.interop import mode_predicates
from trtspec.methods.custom.drafter import CustomDrafter
from trtspec.methods.table import METHODS as ROWS
from trtspec.methods.table import Method, Ref, method_of
from trtspec.modes import METHODS, SpeculativeDecodingMode, select_mode, words_for

M = SpeculativeDecodingMode


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    "MTP MTP_EAGLE MTP_EAGLE_ONE_MODEL EAGLE3 EAGLE3_ONE_MODEL NGRAM DRAFT_TARGET USER_PROVIDED "
    "SAVE_HIDDEN_STATES NONE AUTO SUFFIX EAGLE EAGLE_ONE_MODEL MEDUSA MLP_SPECULATOR DRAFT_TARGET_ONE_MODEL PARD "
    "P_EAGLE DFLASH DSPARK GRAMMAR"
)
STATE_HEADS = {"MEDUSA", "MLP_SPECULATOR"}
SHIFTED = {"MTP", "MTP_EAGLE_ONE_MODEL", "EAGLE3_ONE_MODEL", "EAGLE_ONE_MODEL", "P_EAGLE"}
WHOLE_MODELS = {"DRAFT_TARGET_ONE_MODEL", "PARD"}
ONE_ENGINE = {*SHIFTED, *STATE_HEADS, *WHOLE_MODELS, "DFLASH", "DSPARK"}
DRAFT_MODEL = {"EAGLE", "EAGLE3", "DRAFT_TARGET", "MTP_EAGLE"}
ON_HOST = {"NGRAM", "USER_PROVIDED", "SAVE_HIDDEN_STATES", "SUFFIX", "GRAMMAR"}
DRAFTER = DRAFT_MODEL | ON_HOST

TRUE_FOR = {
    "is_mtp_vanilla": {"MTP"},
    "is_save_hidden_states": {"SAVE_HIDDEN_STATES"},
    "use_one_engine": ONE_ENGINE,
    "has_draft_model": DRAFT_MODEL,
    "reads_hidden_states": {"EAGLE", "EAGLE3", "MTP_EAGLE"},
    "draft_kv_is_shifted": {*SHIFTED, "EAGLE", "EAGLE3", "MTP_EAGLE"},
    "drafts_without_kv": STATE_HEADS,
    "drafts_in_parallel": {"PARD", "P_EAGLE", "DFLASH", "DSPARK"},
    "drafts_in_blocks": {"DFLASH", "DSPARK"},
    "shapes_graphs": ONE_ENGINE | DRAFT_MODEL | {"SAVE_HIDDEN_STATES"},
}
TRUE_UPSTREAM = {
    "is_mtp_one_model": {"MTP", "MTP_EAGLE_ONE_MODEL"},
    "is_mtp_eagle": {"MTP_EAGLE"},
    "is_mtp_eagle_one_model": {"MTP_EAGLE_ONE_MODEL"},
    "is_eagle3": {"EAGLE3"},
    "is_eagle3_one_model": {"EAGLE3_ONE_MODEL"},
    "is_ngram": {"NGRAM"},
    "is_draft_target": {"DRAFT_TARGET"},
    "is_draft_target_one_model": {"DRAFT_TARGET_ONE_MODEL"},
    "is_pard": {"PARD"},
    "is_user_provided": {"USER_PROVIDED"},
    "is_none": {"NONE"},
    "is_auto": {"AUTO"},
    "is_suffix": {"SUFFIX"},
    "without_logits": ONE_ENGINE,
    "support_capturable_guided_decoder": ONE_ENGINE,
    "needs_kv_cache_rewind": {*ONE_ENGINE, "NGRAM", "SUFFIX", "GRAMMAR"},
    "needs_kv_cache_recompute": {"EAGLE", "EAGLE3", "MTP_EAGLE"},
    "support_overlap_scheduler": ONE_ENGINE | DRAFT_MODEL,
    "support_guided_decoder": {*DRAFTER, "NONE"},
    "has_spec_decoder": {*SHIFTED, *STATE_HEADS, "DFLASH", "DSPARK", "MTP_EAGLE", "EAGLE3", "EAGLE"},
    "has_spec_drafter": DRAFTER,
}


@dataclass
class Progress:
    is_first_draft: bool


def test_members_keep_their_order_and_values() -> None:
    assert [(mode.name, mode.value) for mode in M] == list(zip(NAMES, range(1, 23), strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("predicate", TRUE_FOR)
def test_predicate(predicate: str, name: str) -> None:
    assert getattr(M[name], predicate)() is (name in TRUE_FOR[predicate])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("predicate", TRUE_UPSTREAM)
def test_predicate_of_tensorrt_llm(predicate: str, name: str) -> None:
    assert getattr(mode_predicates, predicate)(M[name]) is (name in TRUE_UPSTREAM[predicate])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("backend", "sm", "two_engine"),
    [("native", 0, False), ("TRTLLM", 90, False), ("native", 120, True), ("sdpa", 0, True), ("flashinfer", 90, True)],
)
def test_extend_ctx(name: str, backend: str, sm: int, two_engine: bool) -> None:
    assert mode_predicates.extend_ctx(M[name], backend, sm) is (two_engine and name not in ONE_ENGINE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rm", "is_draft", "backend", "chain", "sm", "one_engine", "two_engine"),
    [
        (None, False, "native", False, 90, True, True),  # the target verifies
        (None, False, "native", False, 120, False, True),
        (None, False, "sdpa", False, 90, True, False),
        (None, True, "native", True, 90, True, False),
        (Progress(True), True, "native", True, 90, True, True),  # first step of the chain drafter
        (Progress(True), True, "sdpa", True, 90, True, False),
        (Progress(True), True, "native", False, 90, True, False),
        (Progress(False), True, "native", True, 90, True, False),
    ],
)
def test_attention_need_spec_dec_mode(
    name: str,
    rm: Progress | None,
    is_draft: bool,
    backend: str,
    chain: bool,
    sm: int,
    one_engine: bool,
    two_engine: bool,
) -> None:
    expected = one_engine if name in ONE_ENGINE else two_engine
    found = mode_predicates.attention_need_spec_dec_mode(M[name], rm, is_draft, backend, chain, sm)
    assert found is expected


def test_rows_that_drafting_needs() -> None:
    assert {mode.rows_ahead(4) for mode in M if mode not in (M.DFLASH, M.DSPARK)} == {4}
    assert (
        M.DFLASH.rows_ahead(4) == M.DSPARK.rows_ahead(4) == 5
    )  # their block begins with the token whose KV the others have already


def test_from_string() -> None:
    assert M.from_string(None) is M.NONE
    assert [M.from_string(name.lower()) for name in NAMES] == list(M)
    with pytest.raises(ConfigError, match=r"mode='eagle9'.*use one of MTP, .*AUTO"):
        M.from_string("eagle9")


@pytest.mark.parametrize(
    ("method", "one_engine", "vanilla", "expected"),
    [
        (None, None, False, "NONE"),
        ("draft_model", None, False, "DRAFT_TARGET"),
        ("draft_model", False, False, "DRAFT_TARGET"),
        ("eagle", None, False, "EAGLE_ONE_MODEL"),
        ("eagle", True, False, "EAGLE_ONE_MODEL"),
        ("eagle", False, False, "EAGLE"),
        ("draft_model", True, False, "DRAFT_TARGET_ONE_MODEL"),
        ("eagle3", None, False, "EAGLE3_ONE_MODEL"),
        ("eagle3", True, False, "EAGLE3_ONE_MODEL"),
        ("eagle3", False, False, "EAGLE3"),
        ("mtp", None, False, "MTP_EAGLE_ONE_MODEL"),
        ("mtp", True, False, "MTP_EAGLE_ONE_MODEL"),
        ("mtp", False, False, "MTP_EAGLE"),
        ("mtp", None, True, "MTP"),
        ("mtp", True, True, "MTP"),
        ("ngram", None, False, "NGRAM"),
        ("suffix", None, False, "SUFFIX"),
        ("extract_hidden_states", None, False, "SAVE_HIDDEN_STATES"),
        ("custom_class", None, False, "USER_PROVIDED"),
        ("auto", None, False, "AUTO"),
        ("medusa", None, False, "MEDUSA"),
        ("medusa", True, False, "MEDUSA"),
        ("mlp_speculator", None, False, "MLP_SPECULATOR"),
        ("dflash", None, False, "DFLASH"),
        ("dspark", None, False, "DSPARK"),
    ],
)
def test_resolve_mode(method: str | None, one_engine: bool | None, vanilla: bool, expected: str) -> None:
    assert select_mode(method, one_engine, vanilla) is M[expected]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("guess", None), r"method='guess' is unknown; use one of auto, custom_class, dflash, .*suffix"),
        (("ngram", True), r"one_engine=True, vanilla=False .* method='ngram'; use one_engine=False"),
        (("medusa", False), r"one_engine=False, vanilla=False .* method='medusa'; use one_engine=True"),
        (("ngram", None, True), r"vanilla=True .* method='ngram'"),
        (("mtp", False, True), r"one_engine=False, vanilla=True .* method='mtp'; use one_engine=True, vanilla=True or"),
    ],
)
def test_resolve_mode_refuses(args: tuple[str, bool | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_mode(*args)


@pytest.mark.parametrize("one_engine", [None, True])
@pytest.mark.parametrize(("method", "expected"), [("draft_model", M.PARD), ("eagle3", M.P_EAGLE)])
def test_parallel_drafting(method: str, expected: M, one_engine: bool | None) -> None:
    assert select_mode(method, one_engine, parallel=True) is expected
    assert select_mode("dflash", one_engine, parallel=True) is M.DFLASH
    assert words_for(expected) == {"method": method, "one_engine": True, "parallel_drafting": True}


@pytest.mark.parametrize(
    ("method", "one_engine", "message"),
    [
        ("medusa", None, r"parallel_drafting=True does not exist for method='medusa'; .* draft_model, dspark, eagle3"),
        ("ngram", None, r"parallel_drafting=True does not exist for method='ngram'; leave it unset"),
        ("eagle3", False, r"one_engine=False, .* method='eagle3' with parallel_drafting=True; use one_engine=True"),
    ],
)
def test_parallel_drafting_that_there_is_not(method: str, one_engine: bool | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_mode(method, one_engine, parallel=True)


# -- what each is made of ---------------------------------------------------------------------------------------------


def test_every_method_has_a_row_and_every_row_is_a_method() -> None:
    assert sorted(ROWS) == sorted(METHODS)
    assert all(row.name == name for name, row in ROWS.items())
    assert {mode for mode in M if method_of(mode) is None} == {M.NONE}
    assert list(ROWS)[-1] == "draft_model"  # for what no other method recognises


def refs(row: Method) -> Iterator[tuple[str, Ref]]:
    """Yield (place in the row, the Ref)."""
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Ref):
            yield field.name, value
        elif field.name in ("workers", "drafters"):
            yield from ((f"{field.name}-{mode.name}", ref) for mode, ref in value.items())


ALL_REFS = {f"{name}-{where}": ref for name, row in ROWS.items() for where, ref in refs(row)}


@pytest.mark.parametrize("where", ALL_REFS)
def test_every_part_opens(where: str) -> None:
    """Workers, drafters and options are classes with an `of`, trainers are classes, all other parts are callable."""
    ref, part = ALL_REFS[where], where.split("-")[1]
    assert ref.path.startswith("trtspec.methods.")
    opened = ref.open()
    if part in ("workers", "drafters", "options"):
        assert isinstance(opened, type)
        assert callable(opened.of)  # type: ignore[attr-defined]
    elif part == "trainer":
        assert isinstance(opened, type)
    else:
        assert callable(opened)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nowhere:Thing", ImportError),
        ("trtspec.modes:Nothing", AttributeError),
        ("trtspec.modes", AttributeError),
        (":Thing", ValueError),
    ],
)
def test_a_part_that_is_not_there_is_no_error_of_the_user(path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Ref(path).open()


@pytest.mark.parametrize("path", ["nowhere:Thing", "trtspec.modes:Nothing", "trtspec.modes", ":Thing", ""])
def test_a_drafter_that_does_not_open_is_named(path: str) -> None:
    speculation = spec_plan_cases.decide({"method": "custom_class", "drafter": path, "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=rf'^drafter={path!r} cannot be loaded \(.*\); give "package.module:Class"'):
        CustomDrafter.of(speculation)


@pytest.mark.parametrize("mode", [mode for mode in M if mode not in (M.NONE, M.AUTO)])
def test_each_mode_has_a_worker_or_a_drafter_never_both(mode: SpeculativeDecodingMode) -> None:
    row = method_of(mode)
    assert row is not None
    worker, drafter = mode in row.workers, mode in row.drafters
    if mode in (M.SAVE_HIDDEN_STATES, M.GRAMMAR):  # whose drafts, if any, are those that guides add in all modes
        assert not worker
        assert not drafter
        return
    assert worker is mode.use_one_engine()
    assert drafter is not worker
    if drafter:
        assert mode_predicates.has_spec_drafter(mode)
    if mode.use_one_engine() or mode.reads_hidden_states():
        assert row.head is not None


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_speak_of_their_own_modes(row: Method) -> None:
    assert {mode.traits.method for mode in (*row.workers, *row.drafters)} <= {row.name}
    assert (row.trainer is None) is (row.trains is None)
    assert row.needs
