"""The engine does what a configuration says: each case was once a contradiction."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import edit_config, make_checkpoint, make_mimo
from tests.head_checkpoints import make_eagle3
from trtspec.backends.table import BACKENDS
from trtspec.build.context import BuildContext, plan_context
from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.checkpoint.reader import Reader
from trtspec.config.engine import EngineConfig
from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import CheckpointError, ConfigError, UnsupportedError
from trtspec.interop import mode_predicates
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.planning import plan_speculation
from trtspec.models.specs import ARCHITECTURES
from trtspec.modes import SpeculativeDecodingMode

TARGET = TargetInfo(
    model="/t", model_type="llama", vocab_size=100, max_model_len=64, num_hidden_layers=8, max_batch_size=4
)
DRAFTED: dict[str, Any] = {"method": "draft_model", "model": "/d", "num_speculative_tokens": 3}


@pytest.mark.parametrize("one_engine", [True, False])
@pytest.mark.parametrize("eager", [None, False, True])
def test_enforce_eager_turns_graphs_off(tmp_path: Path, eager: bool | None, one_engine: bool) -> None:
    """enforce_eager turns off graphs of draft layers, and of the launch that they are in.

    A target with a drafter next to it keeps its own graphs.
    """
    target = make_checkpoint(tmp_path, "llama")
    head = make_eagle3(tmp_path, target, (0, 1), tuple(range(11)))
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2, "one_engine": one_engine}
    config = EngineConfig(backend="cuda", max_batch_size=4, max_num_tokens=64, max_seq_len=32)
    wanted = read_speculative_config({**asked, "enforce_eager": eager})
    context: BuildContext = plan_context(target, wanted, config, BACKENDS["cuda"])
    graphs = {role: context.of(role).cuda_graphs for role in context.roles}
    assert graphs == ({"target": not eager} if one_engine else {"target": True, "draft": not eager})


def test_the_remedy_for_a_wrong_eagle3_target_can_be_followed() -> None:
    config = SpeculativeConfig(method="eagle3", model="/e", num_speculative_tokens=3)
    wrong = TargetInfo(**{**TARGET.__dict__, "model_type": "mamba"})
    with pytest.raises(ConfigError, match=r"use a target of .*") as caught:
        plan_speculation(config, wrong)
    named = str(caught.value).split("use a target of ")[1].split(", ")
    loadable = {name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES}
    assert named
    assert set(named) <= loadable
    for model_type in named:
        right = TargetInfo(**{**TARGET.__dict__, "model_type": model_type})
        assert plan_speculation(config, right).mode is SpeculativeDecodingMode.EAGLE3_ONE_MODEL


@pytest.mark.parametrize("k", [2, 3])
def test_a_draft_tree_is_called_that(k: int) -> None:
    tree = "[(0,), (1,), (0, 0)]"  # 2 deep
    with pytest.raises(UnsupportedError, match="a draft tree, which mode=NGRAM does not take yet"):
        plan_speculation(
            SpeculativeConfig(method="ngram", num_speculative_tokens=k, speculative_token_tree=tree), TARGET
        )


@pytest.mark.parametrize("field", ["prompt_lookup_min", "prompt_lookup_max"])
def test_lookup_sizes_next_to_another_method_are_ignored_with_a_warning(field: str) -> None:
    config = SpeculativeConfig(**DRAFTED, **{field: 4})
    with pytest.warns(UserWarning, match=f"{field}=4 means nothing to method='draft_model'; it is ignored"):
        plan_speculation(config, TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_speculation(SpeculativeConfig(method="ngram", num_speculative_tokens=2, **{field: 4}), TARGET)


def quantised(**fields: Any) -> DraftInfo:
    folder = Path("/d")
    config = {"quantization_config": fields} if fields else {}
    found = CheckpointQuantization.read(Reader(config, folder / "config.json", "draft"))
    checkpoint = CheckpointConfig(path=folder, model_type="llama", raw=config, quantization=found)
    return DraftInfo(method="draft_model", vocab_size=100, checkpoint=checkpoint)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("kind", "draft", "good"),
    [
        ("gptq", quantised(**GPTQ), True),
        ("awq", quantised(**AWQ), True),
        ("fp8", quantised(**FP8), True),
        ("modelopt", quantised(**FP8), True),
        ("awq", quantised(**GPTQ), False),
        ("fp8", quantised(**AWQ), False),
        ("fp8", quantised(), False),
        ("gptq", None, False),
    ],
)
def test_a_draft_s_quantization_may_be_named_where_its_checkpoint_has_it(
    kind: str, draft: DraftInfo | None, good: bool
) -> None:
    config = SpeculativeConfig(**DRAFTED, quantization=kind)
    if good:
        assert plan_speculation(config, TARGET, draft).quantization is None  # nothing is quantised again
    else:
        with pytest.raises(UnsupportedError, match=f"quantization='{kind}': the draft's weights are "):
            plan_speculation(config, TARGET, draft)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(None, None), ("gptq", None), ("int4", None), ("int8", ConfigError), ("awq", UnsupportedError)],
)
def test_a_quantization_of_layers_inside_a_quantised_target_is_checked_against_it(
    tmp_path: Path, kind: str | None, refused: type[Exception] | None
) -> None:
    target = make_mimo(tmp_path)
    edit_config(target, quantization_config=GPTQ)
    asked = SpeculativeConfig(method="mtp", num_speculative_tokens=1, quantization=kind)

    def plan() -> BuildContext:
        config = EngineConfig(max_batch_size=4, max_num_tokens=64, max_seq_len=32)
        return plan_context(target, asked, config, BACKENDS["eager"])

    if refused is None:
        assert plan().quantizations == (None, "int4" if kind == "int4" else None)
    else:
        with pytest.raises(refused, match=rf"quantization ?= ?'{kind}': the .* quantised .*gptq, int4 in groups of 32"):
            plan()


@pytest.mark.parametrize("fields", [{"method": "[ngram]"}, {"model": "[ngram]"}, {"method": "ngram", "model": "ngram"}])
def test_ngram_in_brackets_is_ngram(fields: dict[str, str]) -> None:
    spec_plan = plan_speculation(SpeculativeConfig(**fields, num_speculative_tokens=2), TARGET)
    assert spec_plan.mode is SpeculativeDecodingMode.NGRAM


def test_a_folder_that_is_called_as_its_method_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_checkpoint(tmp_path, "llama")
    asked = SpeculativeConfig(method="draft_model", model="draft_model", num_speculative_tokens=2)
    config = EngineConfig(max_batch_size=4, max_num_tokens=64, max_seq_len=32)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="draft_model"):
        plan_context(target, asked, config, BACKENDS["eager"])
    Path("draft_model").symlink_to(target)
    context = plan_context(target, asked, config, BACKENDS["eager"])
    assert context.draft is not None
    assert context.draft.path == Path("draft_model")


def test_what_the_engine_never_asks_is_no_method_of_a_mode() -> None:
    """TensorRT-LLM's predicates are functions of interop, and those of the engine are methods of the enum."""
    answers = {name for name, one in vars(mode_predicates).items() if callable(one) and name[0].islower()}
    for name in ("support_overlap_scheduler", "support_capturable_guided_decoder", "without_logits"):
        assert name in answers
    assert not {name for name in answers if hasattr(SpeculativeDecodingMode, name)} - {"dataclass"}


def test_a_configuration_claims_no_hash_of_its_graphs() -> None:
    """An engine folder compares the fields that its graphs depend on, one by one, and names the one that differs."""
    assert not hasattr(SpeculativeConfig, "compute_hash")
