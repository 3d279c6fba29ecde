"""The part of a cache key that a speculation decides."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from tests.unit.spec_plan_cases import decide
from trtspec.build.cache_key import in_graphs
from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.config.tree import DynamicTree
from trtspec.methods.ngram.options import NGramOptions
from trtspec.modes import SpeculativeDecodingMode

OTHER: dict[str, Any] = {
    "speculative_token_tree": ((0,),),
    "dynamic_tree": DynamicTree(3, 8, 2),
    "mode": SpeculativeDecodingMode.EAGLE,
    "num_speculative_tokens": 5,
    "chooses_draft_len": True,
    "quantization": "int8",
    "draft_sample_method": "greedy",
    "draft_confidence_threshold": 0.5,
    "capture_layers": (0, 2),
    "mask_token_id": 7,
    "options": NGramOptions(
        prompt_lookup_min=1,
        prompt_lookup_max=2,
        prompt_lookup_latest=False,
        is_public_pool=None,
        is_keep_all=True,
        ngram_pool_size=3,
    ),
    "disable_by_batch_size": 4,
    "draft_len_schedule": ((4, 3), (8, 1)),
    "num_speculative_tokens_per_batch_size": ((1, 4, 3), (5, 8, 1)),
    "max_concurrency": 4,
}
"""Another value of each field that graphs depend on."""

AT_RUN_TIME: dict[str, Any] = {
    "method": "eagle",
    "model": "/elsewhere",  # its files have a digest of their own
    "max_model_len": 77,
    "sa_threshold": 4,
    "enforce_eager": True,
    "disable_logprobs": True,
    "draft_tensor_parallel_size": 2,
    "max_batch_size": 3,
    "max_num_tokens": 99,
}
"""Another value of each other field."""


def test_the_key_has_every_setting_that_graphs_depend_on() -> None:
    """A setting that is compiled in and not in the key would silently do nothing: an older engine would be found."""
    plan = decide({"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3, "one_engine": True})
    assert {*OTHER, *AT_RUN_TIME} == {field.name for field in fields(SpeculationPlan)}
    for name, value in OTHER.items():
        assert in_graphs(replace(plan, **{name: value})) != in_graphs(plan), name
    schedule = replace(
        plan, draft_len_schedule=((4, 3), (8, 1))
    )  # graphs for 0, 1 and 3 drafts, as chosen lengths have
    assert in_graphs(schedule) != in_graphs(replace(schedule, chooses_draft_len=True)), "these give scores"
    for name, value in AT_RUN_TIME.items():
        assert in_graphs(replace(plan, **{name: value})) == in_graphs(plan), name
