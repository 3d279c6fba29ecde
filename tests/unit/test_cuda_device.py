"""The GPU's code path, as far as it can be shown without a GPU.

Every tensor of a step is on the device of the step's inputs. Without a usable GPU, an error says what is wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.checkpoints import make_checkpoint
from tests.head_checkpoints import make_eagle3
from trtspec import LLM
from trtspec.backends.cuda import aoti, device
from trtspec.backends.cuda.chain_graph import chain_step
from trtspec.backends.export import GraphStep, example_for, moved
from trtspec.backends.graph_io import INPUTS, graph_inputs, input_names, output_names
from trtspec.backends.table import BACKENDS
from trtspec.build.context import plan_context
from trtspec.build.steps import build_step
from trtspec.carry import Carry
from trtspec.config.engine import EngineConfig
from trtspec.core import StepInputs
from trtspec.errors import CapacityError, DependencyError, DeviceError, UnsupportedError
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.drafter import CHAIN_ROWS
from trtspec.methods.step import Step

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """A check that no op gets a CPU tensor, unless the tensor is a number."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            assert not isinstance(value, Tensor) or value.is_meta or value.dim() == 0, f"{op} is given a CPU tensor"
        return op(*args, **(kwargs or {}))


class NothingFromTheHost(TorchFunctionMode):
    """A check that nothing makes a tensor from Python's numbers: a CUDA graph cannot copy them from the host.

    Modes of the dispatcher do not see it.
    """

    COPIES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert function not in self.COPIES, f"{function.__name__} copies from the host"
        return function(*args, **(kwargs or {}))


TREES: dict[str, dict[str, Any]] = {
    "eagle3": {"num_speculative_tokens": 3},
    "a tree": {"speculative_token_tree": "[(0,), (1,), (0, 0)]"},
    "a dynamic tree": {"num_speculative_tokens": 2, "max_total_draft_tokens": 3, "dynamic_tree_max_topK": 2},
}


def fake_step(folder: Path, mode: str) -> Step:
    target = make_checkpoint(folder, "llama")
    speculation = None
    if mode != "none":
        head = make_eagle3(folder, target, (0, 1), tuple(range(11)))
        speculation = read_speculative_config({"method": "eagle3", "model": str(head), **TREES[mode]})
    return build_step(plan_context(target, speculation, EngineConfig(backend="cuda"), BACKENDS["cuda"]))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("mode", ["none", *TREES])
def test_a_step_mixes_no_devices(tmp_path: Path, mode: str, uniform: bool) -> None:
    """Tensors that a step makes itself are on the device of its inputs: here the meta device, without memory.

    They are made there, not copied from the host.
    """
    step = fake_step(tmp_path, mode)
    K = 0 if mode == "none" else 3
    module = GraphStep(step, K, K + 1 if uniform else 0)
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    example = example_for(step, K, 16, uniform)
    inputs, there = moved(example, META), {name: moved(weight, META) for name, weight in weights.items()}
    with torch.no_grad(), OneDevice(), NothingFromTheHost():
        kv = [tuple(torch.empty(9, 16, h, d, device="meta") for _ in "kv") for h, d, _ in step.kv_layers]
        T, B = inputs.input_ids.shape[0], inputs.spec.batch_size
        numbers = torch.empty(T, dtype=torch.int64, device="meta")
        kept = torch.empty(B, dtype=torch.int32, device="meta")
        last = torch.empty(B, K + 1, dtype=torch.int64, device="meta")
        inputs = Carry(numbers, kept.long()).apply(inputs, last, kept, 100)
        given = graph_inputs(inputs, input_names(step, uniform))
        outputs, _ = torch.func.functional_call(module, there, (given, kv))
    assert set(outputs) == set(output_names(step))
    assert all(tensor.is_meta for tensor in outputs.values())


def test_a_chain_mixes_no_devices(tmp_path: Path) -> None:
    step = fake_step(tmp_path, "none")
    weights = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    B, K, bans = 4, 3, 2
    sizes = {"input_ids": (CHAIN_ROWS * B,), "block_tables": (B, 5), "ban_ids": (B, bans), "ban_until": (B, bans)}
    names = [name for name in input_names(step) if name not in ("tree_mask", "seq_lens", "gather_ids")]
    there = {name: moved(weight, META) for name, weight in weights.items()}
    with OneDevice(), NothingFromTheHost():
        kv = [tuple(torch.empty(9, 16, h, d, device="meta") for _ in "kv") for h, d, _ in step.kv_layers]
        given = {name: torch.empty(sizes.get(name, (B,)), dtype=INPUTS[name].dtype, device="meta") for name in names}

        def run_pass(inputs: StepInputs) -> Tensor:
            tokens: Tensor = torch.func.functional_call(step, there, (inputs, kv)).tokens
            return tokens

        drafts = chain_step(given, K, run_pass, 100)
    assert drafts.is_meta
    assert drafts.shape == (B, K)


def test_graphs_for_a_gpu_call_no_kernel_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options for the compiler name no kernel of the CPU. Nothing is exported or compiled."""
    options: dict[str, Any] = {}
    nothing = SimpleNamespace(state_dict={}, constants={}, get_constant_fqns=list)
    monkeypatch.setattr(aoti, "open_gpu", lambda: torch.device("meta"))
    monkeypatch.setattr(aoti, "example_kv", lambda *_: [])
    monkeypatch.setattr(aoti, "export_step", lambda *_: nothing)
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *_, inductor_configs, **__: options.update(inductor_configs)
    )
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_: nothing)
    compiled = aoti.compile_step(fake_step(tmp_path, "none"), 16, [(0, False)], tmp_path)
    assert options
    assert "aot_inductor.custom_ops_to_c_shims" not in options
    assert compiled.kernels == ""


# --- errors where there is no GPU, or an unsuitable one ---------------------------------------------------------------


def gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (9, 0),
    built_for: tuple[str, ...] = ("sm_80", "sm_90", "compute_90"),
    toolkit: str | None = "13.0",
    driver: int | None = 13000,
    visible: bool = True,
) -> None:
    """Make torch report this machine."""
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(device, "driver_version", lambda: driver)
    answers = {
        "is_available": visible,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": "Some GPU",
        "get_arch_list": list(built_for),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def test_a_gpu_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    assert device.open_gpu() == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("machine", "error", "says"),
    [
        ({"toolkit": None}, DependencyError, "built without CUDA"),
        ({"visible": False, "driver": None}, DependencyError, "no NVIDIA driver"),
        ({"visible": False, "driver": 12080}, DependencyError, "serves CUDA 12.8, and torch is built with CUDA 13.0"),
        ({"visible": False}, DependencyError, "CUDA_VISIBLE_DEVICES"),
        ({"visible": False, "driver": 13020, "toolkit": "13.1"}, DependencyError, "CUDA_VISIBLE_DEVICES"),
        ({"capability": (7, 5)}, UnsupportedError, "compute capability 7.5, and the kernels want 8.0"),
        ({"capability": (12, 0)}, None, ""),  # runs by compute_90's PTX
        ({"capability": (12, 0), "built_for": ("sm_80", "sm_90")}, UnsupportedError, "built for sm_80, sm_90"),
    ],
)
def test_what_is_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], error: type[Exception] | None, says: str
) -> None:
    gpu(monkeypatch, **machine)
    if error is None:
        device.open_gpu()
    else:
        with pytest.raises(error, match=says):
            device.open_gpu()


def test_this_build_of_torch_has_no_gpu() -> None:
    if torch.version.cuda is not None:
        pytest.skip("it may have one")
    with pytest.raises(DependencyError, match="built without CUDA"):
        device.open_gpu()


def test_a_gpu_without_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References do not serve for want of a plugin, only where they are asked for."""
    monkeypatch.delenv("TRTSPEC_PLUGINS", raising=False)
    monkeypatch.setattr("trtspec.build.wiring.open_gpu", lambda: torch.device("cuda", 0))
    with pytest.raises(DependencyError, match="no kernels for GPUs are loaded for spec_attention_, packed_linear: "):
        LLM(make_checkpoint(tmp_path, "llama"), backend="cuda")
    monkeypatch.setenv("TRTSPEC_PLUGINS", "0")
    device.require_kernels(torch.device("cuda", 0))


def test_memory_of_engines_that_are_gone_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is free only once Python has collected the engine, and torch has returned what it keeps."""

    class Engine:
        def __init__(self) -> None:
            self.me = self

    held, there = {"free": 1, "kept": 0, "in use": 4}, Engine()

    def collected() -> None:
        held["kept"], held["in use"] = held["in use"], 0

    def empty_cache() -> None:
        held["free"], held["kept"] = held["free"] + held["kept"], 0

    weakref.finalize(there, collected)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (held["free"], 9))
    del there
    assert device.free_memory(META) == 5


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((8, 6), ["sm_80"], True),  # within a major version, newer GPUs run older code
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((10, 3), ["sm_100"], True),
        ((12, 1), ["sm_100", "sm_120"], True),
        ((12, 0), ["compute_80"], True),
    ],
)
def test_which_code_runs_where(capability: tuple[int, int], built_for: list[str], runs: bool) -> None:
    """Code runs by NVIDIA's rules of binary and PTX compatibility.

    They are in https://docs.nvidia.com/cuda/cuda-c-programming-guide.
    """
    assert device.runs_on(capability, built_for) == runs


@pytest.mark.parametrize(
    ("raised", "error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), CapacityError, "memory is full"),
        (torch.AcceleratorError("CUDA error: out of memory"), CapacityError, "memory is full"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), CapacityError, "memory is full"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), DeviceError, "illegal memory access"),
        (RuntimeError("shapes do not fit"), RuntimeError, "shapes do not fit"),
    ],
)
def test_errors_of_the_device(raised: Exception, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught, device.device_errors():
        raise raised
    assert type(caught.value) is error


def test_a_graph_is_captured_on_the_queue_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's current GPU is the queue's before torch begins a capture, whatever it was."""
    current = [0]

    @contextmanager
    def on(gpu: torch.device) -> Iterator[None]:
        current.append(gpu.index)
        yield
        current.pop()

    @contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        assert current[-1] == 1
        yield

    graph = SimpleNamespace(pool=lambda: (0, 1), replay=lambda: None)
    for name, there in {"device": on, "graph": capturing, "CUDAGraph": lambda: graph}.items():
        monkeypatch.setattr(torch.cuda, name, there)
    monkeypatch.setattr(device.CudaQueue, "submit", lambda self, work: work())
    monkeypatch.setattr(device.CudaQueue, "mark", lambda self: SimpleNamespace(wait=lambda: None))
    queue = device.CudaQueue.__new__(device.CudaQueue)
    queue.device, queue._stream, queue._pool = torch.device("cuda", 1), None, None
    assert queue.capture(lambda: None) is graph.replay
    assert current == [0]


def test_a_torch_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti, "open_gpu", lambda: torch.device("cpu"))
    aoti.require()
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(UnsupportedError, match=r"torch 2\.11\.0\+cu130 may crash when it loads a graph"):
        aoti.require()
