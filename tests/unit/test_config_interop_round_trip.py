"""Speculation as settings of TensorRT-LLM and of vLLM, and back: only fields with a warning may change."""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.config.speculation_plan import DraftInfo, SpeculationPlan, TargetInfo, draft_len_for_batch
from trtspec.config.speculative import SpeculativeConfig
from trtspec.interop.export import export_settings, settings_text
from trtspec.interop.field_mapper import GATES
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import plan_unchecked

TARGET = TargetInfo(
    model="/t",
    model_type="llama",
    vocab_size=100,
    max_model_len=512,
    num_hidden_layers=12,
    max_batch_size=64,
    tensor_parallel_size=2,
)
HEAD = DraftInfo(method="eagle3", vocab_size=100, max_model_len=512, capture_layers=(2, 5, 8))
BLOCKS = {
    method: DraftInfo(method=method, vocab_size=100, max_model_len=512, capture_layers=(2, 5), mask_token_id=9)
    for method in ("dflash", "dspark")
}
TRT, VLLM = "tensorrt-llm", "vllm"
K = 4
SIZES = st.integers(1, 70)


@st.composite
def schedules(draw: st.DrawFn) -> dict[int, int]:
    schedule = draw(st.dictionaries(SIZES, st.integers(0, K), min_size=1, max_size=4))
    schedule[min(schedule)] = K
    return schedule


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    ends = sorted(draw(st.sets(st.integers(2, 70), min_size=1, max_size=6)))
    starts = [1, *(draw(st.integers(low + 1, high)) for low, high in itertools.pairwise(ends))]
    return [(start, end, draw(st.integers(0, K + 1))) for start, end in zip(starts, ends, strict=True)]


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


COMMON = maybe(
    enforce_eager=st.booleans(),
    draft_tensor_parallel_size=st.sampled_from([1, 2]),
    max_model_len=st.integers(K + 1, 512),
    disable_by_batch_size=st.integers(2, 70),
    num_speculative_tokens_per_batch_size=ranges(),
    disable_padded_drafter_batch=st.booleans(),
    disable_logprobs=st.booleans(),
    draft_sample_method=st.sampled_from(["greedy", "probabilistic"]),
    rejection_sample_method=st.sampled_from(["strict", "block"]),
    revision=st.text(),
)
EITHER = st.one_of(maybe(draft_len_schedule=schedules()), maybe(max_concurrency=SIZES))
OWN: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "ngram": st.tuples(st.integers(1, 6), st.integers(0, 6)).flatmap(
        lambda sizes: maybe(
            prompt_lookup_min=st.just(sizes[0]),
            prompt_lookup_max=st.just(sum(sizes)),
            prompt_lookup_latest=st.booleans(),
            is_public_pool=st.booleans(),
        )
    ),
    "draft_model": st.fixed_dictionaries(
        {"model": st.text(min_size=1)}, optional={"quantization": st.sampled_from(["int8", "fp8"])}
    ),
    "eagle3": st.fixed_dictionaries(
        {"model": st.text(min_size=1)},
        optional={
            "one_engine": st.booleans(),
            "capture_layers": st.lists(st.integers(-1, 11), min_size=1, max_size=4),
            "sa_config": st.fixed_dictionaries({}, optional={"threshold": st.integers(1, 9)}),
            "quantization": st.just("int4"),
        },
    ),
    **dict.fromkeys(
        BLOCKS,
        st.fixed_dictionaries(
            {"model": st.text(min_size=1)},
            optional={
                "parallel_drafting": st.booleans(),
                "capture_layers": st.lists(st.integers(0, 11), min_size=1, max_size=4),
                "quantization": st.just("int8"),
            },
        ),
    ),
    "mtp": maybe(one_engine=st.just(True), vanilla=st.booleans(), quantization=st.just("fp8")),
    "extract_hidden_states": st.fixed_dictionaries(
        {"output_directory": st.text()},
        optional={
            "write_interval": st.integers(1, 50),
            "file_prefix": st.from_regex(r"[\w.+-]+", fullmatch=True),
            "capture_layers": st.lists(st.integers(-1, 11), min_size=1, max_size=4),
        },
    ),
}


@st.composite
def configs(draw: st.DrawFn, *methods: str) -> dict[str, Any]:
    method = draw(st.sampled_from(methods))
    return {"method": method, "num_speculative_tokens": K, **draw(COMMON), **draw(EITHER), **draw(OWN[method])}


def planned(config: SpeculativeConfig | None, draft: DraftInfo | None) -> SpeculationPlan:
    assert config is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warning about one MTP layer that runs K times
        return plan_unchecked(config, TARGET, draft)


def settled(spec_plan: SpeculationPlan) -> dict[str, Any]:
    """All fields of a plan, including those of its method alone."""
    found = {field.name: getattr(spec_plan, field.name) for field in dataclasses.fields(spec_plan)}
    return vars(found.pop("options")) | found


def differences(before: SpeculationPlan, after: SpeculationPlan) -> set[str]:
    """Fields that changed. GATES count as one, "draft_len": the lengths that they give 1 to max_batch_size requests."""
    old, new = settled(before), settled(after)
    found = {name for name in {*old, *new} - {*GATES} if name not in old or name not in new or old[name] != new[name]}
    sizes = range(1, TARGET.max_batch_size + 1)
    lengths = [[draft_len_for_batch(spec_plan, n) for n in sizes] for spec_plan in (before, after)]
    return found | ({"draft_len"} if lengths[0] != lengths[1] else set())


def explained(lines: dict[str, str]) -> set[str]:
    """Fields that the warnings allow to change."""
    unwritten_gate = any(field in lines and "not written" in lines[field] for field in GATES)
    lookups = ["sa_threshold"] if "sa_config" in lines else []
    return {*lines, *lookups, *(["draft_len"] if unwritten_gate else [])}


@given(configs(*OWN), st.sampled_from([None, HEAD]))
def test_tensorrt_llm_and_back(fields: dict[str, Any], head: DraftInfo | None) -> None:
    yaml = pytest.importorskip("yaml")
    config = SpeculativeConfig(**fields)
    draft = head if config.method == "eagle3" else BLOCKS.get(str(config.method))
    settings, found = export_settings(config, TRT, draft)
    lines = {warning.field: str(warning) for warning in found}
    read = yaml.safe_load(settings_text(settings, TRT))["speculative_config"]
    assert read == settings
    changed = differences(planned(config, draft), planned(read_speculative_config(read), draft))
    if config.is_public_pool is None:
        changed.discard("is_public_pool")  # unset, it searches the request's own tokens, as a pool per request does
    if config.draft_sample_method == "greedy":
        changed.discard("draft_sample_method")  # TensorRT-LLM drafts greedily, and has no setting for it
    assert changed <= explained(lines)


@given(configs(*sorted(OWN.keys() - {"extract_hidden_states"})), st.sampled_from([None, HEAD]))
def test_vllm_and_back(fields: dict[str, Any], head: DraftInfo | None) -> None:
    config = SpeculativeConfig(**fields)
    draft = head if config.method == "eagle3" else BLOCKS.get(str(config.method))
    settings, found = export_settings(config, VLLM, draft)
    lines = {warning.field: str(warning) for warning in found}
    read = json.loads(settings_text(settings, VLLM))
    changed = differences(planned(config, draft), planned(read_speculative_config(read), draft))
    if "one_engine" in lines or "vanilla" in lines:
        changed.discard("mode")
    assert changed <= explained(lines)
