"""Draft heads whose checkpoints are quantised already, in their public layouts.

They make the drafts of the floats they stand for, in less memory, and the text does not depend on them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import edit_config, edit_tensors
from tests.dspark_checkpoints import make_dspark
from tests.e2e.tiny import (
    Outcome,
    add_tokenizer,
    assert_all_blocks_free,
    draw_cases,
    make_target,
    run_alone,
    run_together,
)
from tests.fp8_checkpoints import Fp8Kind
from tests.head_checkpoints import make_dflash, make_eagle, make_eagle3
from tests.models.built_heads import head_of
from tests.quantized_checkpoints import Kind, quantised
from trtspec import LLM
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.interop.reading import read_speculative_config
from trtspec.models.layers import Linear, weight_bytes
from trtspec.models.weights import describe_decoder, load_decoder

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 64, "block_size": 4}
CASES = draw_cases(8, seed=5, most_prompt=40, most_tokens=16)
INT4, INT8 = Kind("pack-quantized", 4, 32), Kind("int-quantized", 8, -1)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 6}
CAPTURE, MASK, K = (0, 2, 4), 15, 3
SOME_IDS = range(1, 16, 2)

Make = Callable[[Path, Path], Path]
HEADS: dict[str, tuple[str, Make]] = {
    "eagle3": ("eagle3", lambda path, target: make_eagle3(path, target, CAPTURE, SOME_IDS)),
    "eagle3 of speculators": (
        "eagle3",
        lambda path, target: make_eagle3(path, target, CAPTURE, SOME_IDS, speculators=True, norm_before_fc=True),
    ),
    "p-eagle": (
        "eagle3",
        lambda path, target: make_eagle3(path, target, CAPTURE, SOME_IDS, num_layers=2, mask=MASK, speculators=True),
    ),
    "eagle": ("eagle", lambda path, target: make_eagle(path, target, head="own", fc_bias=True)),
    "dflash": ("dflash", lambda path, target: make_dflash(path, target, CAPTURE, MASK)),
    "dspark": ("dspark", lambda path, target: make_dspark(path, target, CAPTURE, MASK, rank=32, target_ids=SOME_IDS)),
    "dspark of DeepSpec": (
        "dspark",
        lambda path, target: make_dspark(path, target, CAPTURE, MASK, rank=32, markov="gated", deepspec=True),
    ),
}
KINDS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "int4": (INT4, {}),
    "int4, lm_head too": (INT4, {"ignore": []}),
    "int4 with zero points": (Kind("pack-quantized", 4, 32, False, scales=torch.bfloat16), {}),
    "int8": (INT8, {}),
    "int8, lm_head too": (INT8, {"ignore": []}),
    "gptq": (Kind("gptq", 4, 32), {}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("models"), **SIZES)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def alone(target: Path) -> list[Outcome]:
    """The outcome of each case alone, without speculation."""
    return run_alone(LLM(target, num_kv_blocks=64, **LIMITS).engine, CASES)


def heads(tmp_path: Path, target: Path, name: str, kind: str) -> tuple[str, Path, Path]:
    """Return the method, the quantised head, and the floats that it stands for."""
    method, make = HEADS[name]
    how, changes = KINDS[kind]
    # a table, and the part that public files do not quantise
    keep = ("markov_w1", *(() if changes else ("lm_head",)))
    return method, *quantised(make(tmp_path, target), tmp_path / "made", how, keep, **changes)


def speculation(method: str, model: Path, **fields: Any) -> dict[str, Any]:
    return {"method": method, "model": str(model), "num_speculative_tokens": K, **fields}


class Rows:
    """Attention of the newest rows over all rows of one sequence, in every layer."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kept:
            k, v = (torch.cat(pair) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


@torch.no_grad()
def draft_logits(head: Any, method: str) -> Tensor:
    """Logits [10, Vd] of random hidden states and ids."""
    generator = torch.Generator().manual_seed(3)
    width = 64 if method in ("eagle", "mtp") else 3 * 64
    states, ids = torch.randn(10, width, generator=generator), torch.randint(15, (10,), generator=generator)
    positions, attend = torch.arange(10), Rows()
    h = head.fuse(states)
    if method in ("dflash", "dspark"):
        head.read_in(h, positions, attend)
        positions = positions + 10
    y = head(ids, h, positions, attend)
    logits = head.logits(y)
    if method == "dspark":
        e = head.before(ids, y)
        logits = head.biased(logits, y, e, torch.zeros_like(e))[0] + head.confidences(y, e)[:, None]
    return logits  # type: ignore[no-any-return]


def round_inputs(head: torch.nn.Module, like: torch.nn.Module, kind: Kind) -> None:
    """Round the inputs of the linears that are quantised in `like`, as test_quantized_checkpoints.round_inputs does."""

    def rounded(linear: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
        groups = inputs[0].unflatten(-1, (-1, kind.group_size if kind.bits == 4 else inputs[0].shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    for name, module in like.named_modules():
        if isinstance(module, Linear) and module.scales.numel():
            head.get_submodule(name).register_forward_pre_hook(rounded)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, kind) for name in ("eagle3", "eagle3 of speculators") for kind in KINDS),
     *((name, kind) for name in [*HEADS][2:] for kind in ("int4", "int8", "int4, lm_head too"))],
)  # fmt: skip
def test_drafts_are_those_of_the_floats(tmp_path: Path, target: Path, name: str, kind: str) -> None:
    """In fp32, drafts are those of the floats, except for the rounding of rows to int8.

    A plan counts the bytes that the head holds, and these are fewer than the floats'.
    """
    fields = {"parallel": name == "p-eagle"}
    assert_drafts_are_those_of_the_floats(*heads(tmp_path, target, name, kind), target, KINDS[kind][0], **fields)


def assert_drafts_are_those_of_the_floats(
    method: str, integers: Path, floats: Path, target: Path, kind: Kind, **fields: Any
) -> None:
    fields |= {"num_captured": len(CAPTURE), "owner": target}
    loaded, described = (
        make(ModelConfig.from_folder(target), torch.float32) for make in (load_decoder, describe_decoder)
    )
    held, plain = (head_of(method, folder, loaded, **fields) for folder in (integers, floats))
    packed = [module for module in held.modules() if isinstance(module, Linear) and module.scales.numel()]
    assert len(packed) >= 5  # fc, and four matrices of a layer
    found, exact = draft_logits(held, method), draft_logits(plain, method)
    assert (found - exact).norm() <= 0.06 * exact.norm()
    assert not torch.equal(found, exact)
    round_inputs(plain, held, kind)
    assert (found - draft_logits(plain, method)).norm() <= 1e-2 * exact.norm()
    assert weight_bytes(head_of(method, integers, described, **fields)) == weight_bytes(held)
    assert held.weight_bytes_for(K) < 0.5 * plain.weight_bytes_for(K)


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        ("eagle3", "int4", {}),
        ("eagle3", "gptq", {}),
        ("eagle3 of speculators", "int8, lm_head too", {}),
        ("eagle3 of speculators", "int4 with zero points", {"one_engine": False}),
        ("p-eagle", "int4", {"parallel_drafting": True}),
        ("eagle", "int4, lm_head too", {}),
        ("dflash", "int8", {}),
        ("dspark", "int4, lm_head too", {}),
    ],
)
def test_speculation_changes_nothing(
    tmp_path: Path, target: Path, alone: list[Outcome], name: str, kind: str, fields: Any
) -> None:
    """Packed requests with drafts, greedy and sampled, equal plain decoding one at a time."""
    method, integers, _ = heads(tmp_path, target, name, kind)
    llm = LLM(target, speculation(method, integers, **fields), num_kv_blocks=64, **LIMITS)
    run = run_together(llm.engine, CASES)
    assert run.outcomes == alone
    assert run.speculation.acceptance_per_position[0] > 0
    assert_all_blocks_free(llm)
    with pytest.raises(ConfigError, match="the draft's checkpoint is quantised already"):
        LLM(target, speculation(method, integers, quantization="int4_g128", **fields), **LIMITS)


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("writer", ["compressed-tensors", "hf_quant_config"])
def test_fp8_heads(tmp_path: Path, target: Path, alone: list[Outcome], writer: str, speculators: bool) -> None:
    """fp8 heads draft as their floats do. modelopt's checkpoints also have scales of a KV cache, which are ignored."""
    kind = Fp8Kind(writer, per_channel=True, inputs=None)
    plain = make_eagle3(tmp_path, target, CAPTURE, SOME_IDS, speculators=speculators)
    folder = Path(shutil.copytree(plain, tmp_path / "fp8"))
    stored = {name: kind.stored(weight, 1.0) for name, weight in load_file(plain / "model.safetensors").items()
              if weight.ndim == 2 and "lm_head" not in name}  # fmt: skip

    def in_fp8(them: dict[str, Tensor]) -> None:
        for name, parts in stored.items():
            del them[name]
            them.update({name.removesuffix("weight") + end: part for end, part in parts.items()})
            if writer == "hf_quant_config" and name.endswith("k_proj.weight"):
                them[name.removesuffix("weight") + "k_scale"] = torch.tensor(0.5)

    edit_tensors(folder, in_fp8)
    edit_tensors(plain, lambda them: them.update({name: kind.matrix(parts) for name, parts in stored.items()}))
    if writer == "hf_quant_config":
        (folder / "hf_quant_config.json").write_text(json.dumps(kind.config()))
    else:
        edit_config(folder, quantization_config=kind.config())
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    held, floats = (head_of("eagle3", path, decoder, num_captured=3) for path in (folder, plain))
    exact = draft_logits(floats, "eagle3")
    assert (draft_logits(held, "eagle3") - exact).norm() <= 1e-5 * exact.norm()
    assert held.weight_bytes_for(K) < 0.5 * floats.weight_bytes_for(K)
    run = run_together(LLM(target, speculation("eagle3", folder), num_kv_blocks=64, **LIMITS).engine, CASES)
    assert run.outcomes == alone
    assert run.speculation.acceptance_per_position[0] > 0


@pytest.mark.parametrize("kind", ["int4", "int8", "gptq"])
def test_mtp_layers(tmp_path: Path, kind: str) -> None:
    """MTP layers may be quantised in a checkpoint of their own, or in a quantised target's."""
    whole, how = make_target(tmp_path, "mimo", num_nextn_predict_layers=1, **SIZES), KINDS[kind][0]
    add_tokenizer(whole)
    integers, floats = quantised(whole, tmp_path / "made", how)
    assert_drafts_are_those_of_the_floats("mtp", integers, floats, whole, how)
    for target, model in ((whole, {"model": str(integers)}), (integers, {})):
        alone = run_alone(LLM(target, num_kv_blocks=64, **LIMITS).engine, CASES)
        wishes = {"method": "mtp", "num_speculative_tokens": 1, **model}
        run = run_together(LLM(target, wishes, num_kv_blocks=64, **LIMITS).engine, CASES)
        assert run.outcomes == alone
        assert run.speculation.acceptance_per_position[0] > 0


@pytest.mark.long
def test_a_compiled_engine(tmp_path: Path, target: Path, alone: list[Outcome]) -> None:
    """The engine folder holds the head's integers and needs no checkpoint."""
    method, integers, _ = heads(tmp_path, target, "eagle3 of speculators", "int4, lm_head too")
    wishes = speculation(method, integers)
    build_engine(target, tmp_path / "engine", read_speculative_config(wishes), EngineConfig(backend="aoti", **LIMITS))
    eager = run_together(LLM(target, wishes, num_kv_blocks=64, **LIMITS).engine, CASES)
    integers.rename(tmp_path / "gone")
    run = run_together(LLM(tmp_path / "engine", num_kv_blocks=64).engine, CASES)
    assert run.outcomes == eager.outcomes == alone
    assert run.speculation.acceptance_per_position[0] > 0


@pytest.mark.parametrize("name", ["eagle3", "eagle3 of speculators", "dflash"])
def test_a_plan_counts_what_is_held(tmp_path: Path, target: Path, name: str) -> None:
    """A plan counts the memory that a head takes before anything is loaded."""
    method, *folders = heads(tmp_path, target, name, "int4")
    counted = []
    for folder in folders:
        wishes = read_speculative_config(speculation(method, folder))
        plan = plan_build(target, wishes, EngineConfig(num_kv_blocks=64, **LIMITS))
        counted.append(plan.executables["target"].weights["head"])
    assert counted[0] < 0.5 * counted[1]


# -- names ---------------------------------------------------------------------------------------------------------


def test_rules_are_about_the_names_in_the_files(tmp_path: Path, target: Path) -> None:
    """Rules apply to the names in the files: speculators has layers.0 where EAGLE3's own layout has midlayer."""
    decoder = load_decoder(ModelConfig.from_folder(target), torch.float32)
    groups = {"g": {"targets": ["re:.*layers\\.0\\.mlp\\.(gate|up)_proj$"], **INT4.scheme_fields()}}
    keep = ("self_attn.q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "fc", "lm_head")
    folder, _ = quantised(
        HEADS["eagle3 of speculators"][1](tmp_path, target), tmp_path / "made", INT4, keep, config_groups=groups
    )
    head = head_of("eagle3", folder, decoder, num_captured=3)
    assert [name for name, part in head.named_modules() if isinstance(part, Linear) and part.scales.numel()] == [
        "midlayer.mlp.gate_up"
    ]


Bad = tuple[Callable[[Path], None], type[TrtSpecError], tuple[str, ...]]
LAYER = "midlayer.mlp.down_proj"


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


BAD: dict[str, Bad] = {
    "no scale": (
        tensors(lambda them: them.pop(f"{LAYER}.weight_scale")),
        WeightsError,
        ("missing: midlayer.mlp.down_proj.weight_scale (64, 4)",),
    ),
    "no integers": (
        tensors(lambda them: them.pop("fc.weight_packed")),
        WeightsError,
        ("missing: fc.weight_packed (64, 24)",),
    ),
    "scales of other groups": (
        tensors(lambda them: them.update({f"{LAYER}.weight_scale": torch.ones(64, 2)})),
        WeightsError,
        ("wrong shape: midlayer.mlp.down_proj.weight_scale is (64, 2), expected (64, 4)",),
    ),
    "integers of another width": (
        tensors(lambda them: them.update({"fc.weight_packed": torch.zeros(64, 16, dtype=torch.int32)})),
        WeightsError,
        ("wrong shape: fc.weight_packed is (64, 16), expected (64, 24)",),
    ),
    "floats for integers": (
        tensors(lambda them: them.update({"fc.weight_packed": torch.zeros(64, 24)})),
        WeightsError,
        ("fc.weight_packed is torch.float32, expected int32",),
    ),
    "zero points that nobody announced": (
        tensors(lambda them: them.update({f"{LAYER}.weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)})),
        WeightsError,
        ("unexpected: midlayer.mlp.down_proj.weight_zero_point",),
    ),
    "a config that says nothing": (
        lambda folder: edit_config(folder, quantization_config=None),
        WeightsError,
        ("missing", "unexpected", "fc.weight_packed", "belong together"),
    ),
    "a kind that is not built": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "bitsandbytes"}),
        UnsupportedError,
        ("bitsandbytes", "compressed-tensors, gptq, awq, modelopt"),
    ),
    "an lm_head that is one and is not": (
        lambda folder: edit_config(folder, quantization_config=INT4.config(ignore=[])),
        WeightsError,
        ("missing: lm_head.weight_packed", "unexpected: lm_head.weight"),
    ),
    "one of three that are a matrix": (
        lambda folder: edit_config(folder, quantization_config=INT4.config(ignore=["midlayer.self_attn.k_proj"])),
        UnsupportedError,
        ("midlayer.self_attn.k_proj is not", "one matrix here"),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_head_is_an_error_that_helps(tmp_path: Path, target: Path, what: str) -> None:
    change, error, words = BAD[what]
    method, folder, _ = heads(tmp_path, target, "eagle3", "int4")
    change(folder)
    with pytest.raises(error) as caught:
        LLM(target, speculation(method, folder), **LIMITS)
    assert all(word in str(caught.value) for word in words), caught.value
