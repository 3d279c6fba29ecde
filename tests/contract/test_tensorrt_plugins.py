"""The plugins in TensorRT's own registry and plugin classes: their declarations, and the JIT form on host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here: make contract-tensorrt")

from trtspec_plugins.tensorrt import register  # noqa: E402
from trtspec_plugins.tensorrt.signatures import PLUGINS, plugin_of  # noqa: E402

import trtspec.ops  # noqa: E402
from tests.contract import batches  # noqa: E402
from tests.contract.fake_builder import TRT_DTYPES, create, enqueue, output_shapes  # noqa: E402
from tests.fake_tensorrt.api import DataType  # noqa: E402
from tests.fake_tensorrt.layer import FakeTensor  # noqa: E402
from tests.fake_tensorrt.plugins import FakePlugin  # noqa: E402
from trtspec.ops.packing import pack_int8, quantize_int4  # noqa: E402

register()
F32, BF16, I32, I64, BOOL = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool
ATTENTION_ATTRIBUTES = {"scale": 0.25, "window": 0, "softcap": 0.0}
# Name -> (attributes, dtype and shape of each input, of each output, aliased input of each output).
DECLARED: dict[str, tuple[dict[str, Any], list[Any], list[Any], list[int]]] = {
    "SpecAttention": (
        ATTENTION_ATTRIBUTES,
        [
            (BF16, ["T", 8, 64]), (BF16, ["T", 2, 64]), (BF16, ["T", 2, 64]),
            (BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64]), (I32, ["B1"]), (I32, ["B"]), (I32, ["B", "M"]),
        ],
        [(BF16, ["T", 8, 64]), (BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64])],
        [-1, -1, -1],
    ),
    "SpecAttentionChained": (
        ATTENTION_ATTRIBUTES,
        [
            (BF16, ["T", 8, 64]), (BF16, ["T", 2, 64]), (BF16, ["T", 2, 64]),
            (BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64]), (I32, ["B1"]), (I32, ["B"]), (I32, ["B", "M"]),
        ],
        [(BF16, ["T", 8, 64]), (BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64])],
        [-1, 3, 4],
    ),
    "ProcessLogits": (
        {},
        [
            (F32, ["R", 32000]), (I64, ["R"]), (I32, ["R", "M"]), (I64, ["R", "M"]),
            (F32, ["R"]), (I32, ["R"]), (F32, ["R"]), (F32, ["R"]),
        ],
        [(F32, ["R", 32000])],
        [-1],
    ),
    "ProcessLogitsConstrained": (
        {},
        [
            (F32, ["R", 32000]), (I64, ["R"]), (I32, ["R", "L"]), (I64, ["R"]), (F32, ["R", 3]), (I32, ["R", "N"]),
            (F32, ["R", "N"]), (I32, ["R", "M"]), (I64, ["R", "M"]), (I32, ["R", 1000]),
            (F32, ["R"]), (I32, ["R"]), (F32, ["R"]), (F32, ["R"]),
        ],
        [(F32, ["R", 32000])],
        [-1],
    ),
    "SpecSample": ({}, [(F32, ["R", 32000]), (BOOL, ["R"]), (I64, ["R"]), (I64, ["R"])], [(I64, ["R"])], [-1]),
    "SpecSampleVocab": (
        {},
        [(F32, ["R", 32000]), (BOOL, ["R"]), (I64, ["R"]), (I64, ["R"]), (I64, [32000])],
        [(I64, ["R"])],
        [-1],
    ),
    "SpecAccept": (
        {},
        [(I64, ["B", 4]), (I64, ["B", 3]), (I32, ["B"]), (I32, ["B"]), (BOOL, ["B"])],
        [(I64, ["B", 4]), (I64, ["B"])],
        [-1, -1],
    ),
    "LinearLogits": ({}, [(BF16, ["R", 192]), (BF16, [32000, 192])], [(F32, ["R", 32000])], [-1]),
    "QuantizeGroups": (
        {"group": 128},
        [(BF16, ["R", 256])],
        [(I32, ["R", 64]), (F32, ["R", 2]), (I32, ["R", 2])],
        [-1, -1, -1],
    ),
    "GroupsLinear": (
        {"bits": 4},
        [
            (BF16, ["R", 256]), (I32, ["R", 64]), (F32, ["R", 2]), (I32, ["R", 2]),
            (I32, [3, 32, 32]), (torch.float16, [3, 2, 32]), (I32, [3, 2, 8]), (BF16, [70]),
        ],
        [(BF16, ["R", 70])],
        [-1],
    ),
    "KvCompact": (
        {},
        [(BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64]), (I32, ["B", "M"]), (I32, ["B"]), (I64, ["B", 4])],
        [(BF16, ["N", 16, 2, 64]), (BF16, ["N", 16, 2, 64])],
        [0, 1],
    ),
}  # fmt: skip
SIZES = {"T": 5, "N": 9, "B": 3, "B1": 4, "M": 2, "R": 6}


def test_every_plugin_is_in_the_registry() -> None:
    creators = {c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == "trtspec"}
    assert creators == set(PLUGINS) == set(DECLARED)


def test_registering_again_changes_nothing() -> None:
    assert register() == [f"trtspec::{name}" for name in PLUGINS]


@pytest.mark.parametrize("name", PLUGINS)
def test_the_registry_knows_each_plugin_s_attributes(name: str) -> None:
    creator = trt.get_plugin_registry().get_creator(name, "1", "trtspec")
    assert tuple(field.name for field in creator.field_names) == PLUGINS[name].attributes


@pytest.mark.parametrize("name", PLUGINS)
def test_inputs_are_those_of_the_table_in_its_order(name: str) -> None:
    from tensorrt_bindings.plugin._lib import QDP_REGISTRY

    definition = QDP_REGISTRY[f"trtspec::{name}"]
    assert tuple(definition.input_tensor_names) == PLUGINS[name].inputs
    assert definition.impl_attr_names == list(PLUGINS[name].attributes)


@pytest.mark.parametrize("name", PLUGINS)
def test_outputs_have_the_ops_dtypes_shapes_and_aliases(name: str) -> None:
    attributes, inputs, outputs, aliases = DECLARED[name]
    plugin = create(name, attributes, trt.QuickPluginCreationRequest.STRICT_JIT)
    assert plugin.get_num_outputs() == len(outputs)
    dtypes = plugin.get_output_data_types([TRT_DTYPES[d] for d, _ in inputs], [len(shape) for _, shape in inputs])
    assert dtypes == [TRT_DTYPES[dtype] for dtype, _ in outputs]
    assert [plugin.get_aliased_input(index) for index in range(len(outputs))] == aliases
    shapes = output_shapes(plugin, [dtype for dtype, _ in inputs], [shape for _, shape in inputs])
    expected = [[SIZES.get(size, size) for size in shape] for _, shape in outputs]
    assert [[size.at(SIZES) for size in shape] for shape in shapes] == expected


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "KvCompact"])  # no step's network has it
def test_the_stand_in_of_the_ordinary_tests_declares_the_same(name: str) -> None:
    attributes, inputs, outputs, aliases = DECLARED[name]

    def described(declared: list[Any]) -> list[Any]:
        kinds = [getattr(DataType, TRT_DTYPES[dtype].name) for dtype, _ in declared]
        return [
            (kind, tuple(size if isinstance(size, int) else -1 for size in shape))
            for kind, (_, shape) in zip(kinds, declared, strict=True)
        ]

    plugin = FakePlugin(name, attributes)
    tensors = [FakeTensor(None, 0, kind, shape) for kind, shape in described(inputs)]
    assert plugin.describe(None, *tensors) == described(outputs)
    assert [plugin.aliases.get(index, -1) for index in range(len(outputs))] == aliases


def test_attributes_of_an_onnx_node_arrive() -> None:
    plugin = create("SpecAttention", {"scale": 0.125, "window": 7, "softcap": 30.0})
    assert plugin.attrs == {"scale": 0.125, "window": 7, "softcap": 30.0}


def test_each_combination_of_inputs_has_one_plugin_or_an_error() -> None:
    for name, signature in PLUGINS.items():
        assert plugin_of(signature.op, signature.inputs, signature.aliases) == name
    with pytest.raises(LookupError, match=r"no TensorRT plugin for SpecSample\(logits\); there are: SpecSample\("):
        plugin_of("SpecSample", ["logits"])


# --- the JIT form on host memory --------------------------------------------------------------------------------------


def reference(name: str, arguments: dict[str, Tensor], attributes: dict[str, Any]) -> list[Tensor]:
    """Run the functional op on copies -> its results."""
    op = getattr(torch.ops.trtspec, PLUGINS[name].torch_op).default
    absent = {
        argument.name: torch.empty(0, dtype=torch.int64 if argument.name == "vocab_ids" else torch.int32)
        for argument in op._schema.arguments
        if argument.name not in arguments and argument.name not in attributes
    }
    copies = {key: value.clone() for key, value in arguments.items()}
    result = op(**copies, **absent, **attributes)
    return list(result) if isinstance(result, tuple) else [result]


def check_jit(name: str, arguments: dict[str, Tensor], attributes: dict[str, Any] | None = None) -> None:
    attributes = attributes or {}
    assert tuple(arguments) == PLUGINS[name].inputs
    expected = reference(name, arguments, attributes)
    plugin = create(name, attributes)
    inputs = list(arguments.values())
    untouched = [value.clone() for value in inputs]
    plugin.get_output_data_types([TRT_DTYPES[value.dtype] for value in inputs], [value.ndim for value in inputs])
    aliases = [plugin.get_aliased_input(index) for index in range(len(expected))]
    if name == "SpecAttention":
        aliases = [-1, 3, 4]  # as the caller binds them
    outputs = [
        inputs[alias] if alias >= 0 else torch.full_like(value, 77)
        for value, alias in zip(expected, aliases, strict=True)
    ]
    enqueue(plugin, inputs, outputs)
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    for index, (value, before) in enumerate(zip(inputs, untouched, strict=True)):
        if index not in aliases:
            assert torch.equal(value.nan_to_num(), before.nan_to_num())


@settings(deadline=None, max_examples=40)
@given(batches.attention(), st.sampled_from([0, 1, 5]), st.sampled_from([0.0, 20.0]), st.sampled_from(["", "Chained"]))
def test_attention_equals_the_reference(
    arguments: dict[str, Tensor], window: int, softcap: float, chained: str
) -> None:
    check_jit(f"SpecAttention{chained}", arguments, {"scale": 0.25, "window": window, "softcap": softcap})


@settings(deadline=None, max_examples=40)
@given(batches.logits())
def test_logits_equal_the_reference(arguments: dict[str, Tensor]) -> None:
    check_jit("ProcessLogits", arguments)


@settings(deadline=None, max_examples=40)
@given(batches.constrained_logits())
def test_constrained_logits_equal_the_reference(arguments: dict[str, Tensor]) -> None:
    check_jit("ProcessLogitsConstrained", arguments)


@settings(deadline=None, max_examples=40)
@given(batches.sample())
def test_samples_equal_the_reference(arguments: dict[str, Tensor]) -> None:
    check_jit("SpecSample", arguments)


@settings(deadline=None, max_examples=40)
@given(batches.sample(vocab_ids=True))
def test_samples_of_a_draft_s_vocabulary_equal_the_reference(arguments: dict[str, Tensor]) -> None:
    check_jit("SpecSampleVocab", arguments)


@settings(deadline=None, max_examples=40)
@given(batches.accept())
def test_acceptance_equals_the_reference(arguments: dict[str, Tensor]) -> None:
    check_jit("SpecAccept", arguments)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_logits_are_the_op_s_as_accumulated(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 192, generator=g).to(dtype), torch.randn(70, 192, generator=g).to(dtype)
    out = torch.full((5, 70), 77.0)
    enqueue(create("LinearLogits", {}), [x, weight], [out])
    assert torch.equal(out, trtspec.ops.packed_linear(x, weight, float_out=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16])
def test_products_in_groups_are_the_op_s(dtype: torch.dtype, bits: int) -> None:
    g = torch.Generator().manual_seed(bits)
    x, bias = torch.randn(5, 128, generator=g).to(dtype), torch.randn(70, generator=g).to(dtype)
    weight, zeros = torch.randn(70, 128, generator=g), torch.empty(0, dtype=torch.uint8)
    if bits == 4:
        held, packed, zeros = quantize_int4(weight, 32)
    else:
        octets = weight.clamp(-4, 4).mul(31).round().to(torch.int8)
        held, packed = pack_int8(octets, torch.rand(70, 4, generator=g))
    wanted = trtspec.ops.packed_linear(x, held, bias, scales=packed, zeros=zeros, out_features=70)
    rounded = [torch.full((5, 32), 7, dtype=I32), torch.full((5, 4), 7.0), torch.full((5, 4), 7, dtype=I32)]
    enqueue(create("QuantizeGroups", {"group": 32}), [x], rounded)
    out = torch.full((5, 70), 77.0).to(dtype)
    points = zeros if bits == 4 else torch.zeros(1, 1, 32, dtype=torch.uint8)
    constants = [held.flatten(2).view(I32), packed, points.view(I32), bias]
    enqueue(create("GroupsLinear", {"bits": bits}), [x, *rounded, *constants], [out])
    assert torch.equal(out, wanted)


@settings(deadline=None, max_examples=40)
@given(batches.compact())
def test_compaction_equals_the_reference(arguments: dict[str, Tensor]) -> None:
    check_jit("KvCompact", arguments)


@settings(deadline=None, max_examples=20)
@given(batches.attention())
def test_calls_chained_over_one_cache_see_each_other_s_rows(arguments: dict[str, Tensor]) -> None:
    """The second of two calls on one binding, as in draft steps, reads what the first has written."""
    attributes = {"scale": 0.25, "window": 0, "softcap": 0.0}
    later = arguments | {"q": arguments["q"] * 2, "k": arguments["k"] * 3, "v": -arguments["v"]}
    first = reference("SpecAttention", arguments, attributes)
    second = reference("SpecAttention", later | {"k_cache": first[1], "v_cache": first[2]}, attributes)
    out = torch.empty_like(arguments["q"])
    for step in (arguments, later):
        enqueue(
            create("SpecAttentionChained", attributes),
            list(step.values()),
            [out, arguments["k_cache"], arguments["v_cache"]],
        )
    for got, wanted in zip((out, arguments["k_cache"], arguments["v_cache"]), second, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_cache_that_is_not_aliased_is_refused() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    tables, starts, path = torch.ones(1, 1, dtype=I32), torch.zeros(1, dtype=I32), torch.zeros(1, 1, dtype=I64)
    inputs = [cache, cache.clone(), tables, starts, path]
    with pytest.raises(RuntimeError, match=r"KvCompact: the new k_cache is not .*ALIASED_PLUGIN_IO_10_03"):
        enqueue(create("KvCompact", {}), inputs, [cache.clone(), inputs[1]])


def test_a_dtype_that_no_op_takes_is_named() -> None:
    from trtspec_plugins.tensorrt.memory import tensor_over

    with pytest.raises(TypeError, match=r"INT8.*the ops take"):
        tensor_over(0, trt.int8, (1,), (1,))


def test_strided_memory_is_viewed_as_it_is() -> None:
    from trtspec_plugins.tensorrt.memory import tensor_over

    memory = torch.arange(12, dtype=torch.int32).view(3, 4)
    view = tensor_over(memory.data_ptr(), trt.int32, (4, 2), (1, 8))
    assert torch.equal(view, memory[::2].T)
    view[0, 0] = -1
    assert memory[0, 0] == -1


def test_without_the_ops_registering_says_what_to_import() -> None:
    import subprocess
    import sys

    assert trtspec.ops is not None  # imported here, not in the process below
    code = "from trtspec_plugins.tensorrt import register; register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "torch has no op trtspec::spec_attention: import trtspec.ops first" in done.stderr
