"""The stand-ins for the runtime's tests have no name and no parameter that TensorRT and cuda-python lack.

Those tests run the runtime on the stand-ins alone, so all that it uses of either library is compared here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here: make contract-tensorrt")
cuda_runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed here")

from tests import tensorrt_stand_in as stand_in  # noqa: E402
from tests.contract.api_names import parameters  # noqa: E402
from trtspec.backends.tensorrt.cuda import Cuda  # noqa: E402
from trtspec.errors import DependencyError  # noqa: E402

OWN = {"dtype", "owns", "queue"}
PAIRS = [
    (stand_in.Runtime, trt.Runtime),
    (stand_in.Engine, trt.ICudaEngine),
    (stand_in.Refitter, trt.Refitter),
    (stand_in.Context, trt.IExecutionContext),
    (stand_in.TensorRT, trt),
]


def public(owner: type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if not name.startswith("_") and name not in OWN}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda value: getattr(value, "__name__", None))
def test_names_and_parameters_are_tensorrts(ours: type, theirs: Any) -> None:
    for name, value in public(ours).items():
        assert hasattr(theirs, name), f"TensorRT has no {name}"
        if inspect.isfunction(value) and theirs is not trt:
            taken = [{*names} for names in parameters(getattr(theirs, name)) or []]
            wanted = set(inspect.signature(value).parameters)
            assert any(wanted <= names for names in taken), f"{name}: {wanted} of {taken}"
    for name in ("num_io_tensors", "num_optimization_profiles", "device_memory_size_v2", "streamable_weights_size"):
        assert hasattr(trt.ICudaEngine, name)
    for name in ("dtype", "size"):
        assert hasattr(trt.Weights, name)
    assert hasattr(trt.Runtime, "engine_host_code_allowed")
    assert trt.ExecutionContextAllocationStrategy.USER_MANAGED
    assert trt.Logger.WARNING


def test_cuda_functions_take_what_they_are_given() -> None:
    for name, function in public(stand_in.CudaRuntime).items():
        theirs = getattr(cuda_runtime, name, None)
        assert theirs is not None or name == "cudaStreamNonBlocking", f"cuda-python has no {name}"
        if inspect.isfunction(function):
            assert len(inspect.signature(function).parameters) - 1 == number_of_parameters(theirs), name
    assert hasattr(cuda_runtime, "cudaStreamNonBlocking")
    for kind in ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"):
        assert hasattr(cuda_runtime.cudaMemcpyKind, kind)
    assert hasattr(cuda_runtime.cudaStreamCaptureMode, "cudaStreamCaptureModeThreadLocal")


def number_of_parameters(function: Callable[..., Any]) -> int:
    """Number of parameters in the first line of a docstring, as Cython writes it: name(type a, type b)."""
    found = re.match(r"\w+\((.*?)\)", (function.__doc__ or "").strip())
    assert found is not None, function
    return len([part for part in found[1].split(",") if part.strip()])


def test_without_a_gpu_the_real_cuda_python_says_so() -> None:
    """On a machine without a GPU, the error is typed and says what to do."""
    if cuda_runtime.cudaGetDeviceCount()[1]:
        pytest.skip("there is a GPU")
    with pytest.raises(DependencyError, match=r"no NVIDIA driver here|shows no GPU|update the driver"):
        Cuda.open()
