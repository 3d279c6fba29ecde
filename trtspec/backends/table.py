"""Table of the backends, one row each, and functions that import their code, whose dependencies may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, cast

import torch

from trtspec.backends.compiled import CompiledExecutable
from trtspec.backends.tensorrt.profiles import MAX_BANS, MAX_BIASES
from trtspec.errors import DependencyError, UnsupportedError
from trtspec.modes import SpeculativeDecodingMode

_M = SpeculativeDecodingMode


@dataclass(frozen=True)
class Backend:
    """One backend: what it can run, and which modules hold its code."""

    name: str
    device: Literal["cpu", "cuda"]
    functional: bool  # graphs return new KV tensors and do not change the KV tensors they take
    packs: bool  # weights have the layouts of ops.packing, quantised or not
    runs_checkpoints: bool = False  # directly, without an engine folder
    # For engine folders. None as executable and compiler: the backend has no engine folders.
    executable: str | None = None  # "module:class", a subclass of CompiledExecutable
    compiler: str | None = None  # module with `compile_step`, and `require()`, which raises if it cannot compile
    extra: str | None = None  # its dependencies come with `pip install 'trtspec[<extra>]'`
    code_for: Literal["", "cpu", "gpu"] = ""  # processor whose instructions its graphs hold; no other runs them
    # Graphs are TensorRT's: one ragged graph per K, with optimisation profiles, one of which is for uniform batches.
    # The cache's size is fixed.
    profiles: bool = False
    plugins: bool = True  # of TensorRT graphs: they call our plugins, unless options say otherwise
    only_float32: bool = False
    causal: bool = False  # attention does not support tree masks
    trees: bool = False  # drafts may be a tree
    only_attention_writes: bool = False  # only attention changes caches in place
    cuts: bool = False  # a decoder of many layers is cut into graphs of a few layers, see aoti/cut.py
    constraints: bool = False  # a target's graphs take LogitConstraints and return logits
    most_biases: int | None = None  # largest size of a request's logit_bias; None: any
    most_bans: int | None = None  # most ids that a request with min_tokens may have to end at; None: any
    torch_gpu: bool = False  # runs on a GPU through torch; executables are subclasses of cuda.executable.CudaExecutable
    # Modes with graphs of their own that tests have run on this backend; others are refused. None: all modes are taken,
    # as on eager.
    verified: frozenset[SpeculativeDecodingMode] | None = None

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise UnsupportedError for a model's dtype in which the backend's graphs cannot compute."""
        if self.only_float32 and dtype != torch.float32:
            raise UnsupportedError(
                f"dtype = {str(dtype).removeprefix('torch.')!r}: ONNX Runtime computes in float32 on a CPU; ask for "
                "dtype float32, with quantization int8 or int4 if memory is short"
            )

    def lists(self, mode: SpeculativeDecodingMode) -> bool:
        """Whether the mode is verified on this backend. Drafters on the host work with any graph of the target."""
        return self.verified is None or not mode.shapes_graphs() or mode in self.verified

    def check_mode(self, mode: SpeculativeDecodingMode, num_speculative_tokens: int, branches: bool = False) -> None:
        """Raise UnsupportedError for a mode whose draft layers the backend cannot run, or that no test ran on it.

        branches: drafts are a tree.
        """
        if branches and not self.trees:
            trees = ", ".join(row.name for row in BACKENDS.values() if row.trees)
            raise UnsupportedError(
                f"a draft tree on backend {self.name} is not built yet; use backend {trees}, or leave "
                "speculative_token_tree and max_total_draft_tokens unset"
            )
        if self.causal and mode.drafts_in_blocks():
            raise UnsupportedError(
                f"mode={mode.name} on backend {self.name}: masks of a block see each other, for which there is no "
                "attention there yet; use another backend"
            )
        if self.only_attention_writes and mode.is_mtp_vanilla() and num_speculative_tokens > 1:
            raise UnsupportedError(
                f"mode=MTP with {num_speculative_tokens} modules on backend {self.name}: they keep states in the KV "
                "cache, which only attention changes there; use another backend, or num_speculative_tokens=1"
            )
        if not self.lists(mode):
            able = (
                row for row in BACKENDS.values() if row.lists(mode) and not (row.causal and mode.drafts_in_blocks())
            )
            others = ", ".join(row.name for row in able)
            raise UnsupportedError(
                f"mode={mode.name} on backend {self.name} is not verified; use another backend ({others}), or another "
                "mode"
            )

    def load_executable(self) -> type[CompiledExecutable]:
        """Return the class that runs its engine folders. DependencyError if a package is missing."""
        assert self.executable is not None
        module, _, name = self.executable.partition(":")
        return cast("type[CompiledExecutable]", getattr(self._import(module), name))

    def load_compiler(self) -> Callable[..., Any]:
        """Return its compile_step, after its `require` has passed. DependencyError if a dependency is missing."""
        assert self.compiler is not None
        module = self._import(self.compiler)
        module.require()
        return cast("Callable[..., Any]", module.compile_step)

    def _import(self, module: str) -> ModuleType:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            if self.extra is None:
                raise
            raise DependencyError(
                f"backend {self.name} needs the package {error.name}: pip install 'trtspec[{self.extra}]'"
            ) from error


# tests/e2e/test_backend_cells.py runs these on the stand-ins of both GPU backends, or a backend's own tests do.
_ON_GPUS = frozenset(
    (
        *(_M.SAVE_HIDDEN_STATES, _M.DRAFT_TARGET, _M.DRAFT_TARGET_ONE_MODEL, _M.MEDUSA),
        *(_M.EAGLE, _M.EAGLE_ONE_MODEL, _M.EAGLE3, _M.EAGLE3_ONE_MODEL),
        *(_M.MTP, _M.MTP_EAGLE, _M.MTP_EAGLE_ONE_MODEL),
    )
)

BACKENDS = {
    row.name: row
    for row in (
        Backend("eager", "cpu", functional=False, packs=True, runs_checkpoints=True, trees=True, constraints=True),
        Backend(
            "cuda",
            "cuda",
            functional=False,
            packs=False,
            runs_checkpoints=True,
            trees=True,
            executable="trtspec.backends.cuda.aoti:AotiOnCuda",
            compiler="trtspec.backends.cuda.aoti",
            code_for="gpu",
            constraints=True,
            torch_gpu=True,
            verified=_ON_GPUS | {_M.PARD, _M.P_EAGLE, _M.MLP_SPECULATOR, _M.DFLASH},
        ),
        Backend(
            "aoti",
            "cpu",
            functional=False,
            packs=True,
            trees=True,
            executable="trtspec.backends.aoti.executable:AotiExecutable",
            compiler="trtspec.backends.aoti.compile",
            code_for="cpu",
            cuts=True,
            constraints=True,
        ),
        Backend(
            "onnx",
            "cpu",
            functional=True,
            packs=False,
            trees=True,
            executable="trtspec.backends.onnx.executable:OnnxExecutable",
            compiler="trtspec.backends.onnx.compile",
            extra="onnx",
            only_float32=True,
            causal=True,
            constraints=True,
        ),
        Backend(
            "tensorrt",
            "cuda",
            functional=True,
            packs=False,
            executable="trtspec.backends.tensorrt.executable:TensorRTExecutable",
            compiler="trtspec.backends.tensorrt.compile",
            extra="tensorrt",
            profiles=True,
            causal=True,
            only_attention_writes=True,
            constraints=True,
            most_biases=MAX_BIASES,
            most_bans=MAX_BANS,
            verified=_ON_GPUS | {_M.PARD, _M.P_EAGLE, _M.MLP_SPECULATOR},
        ),
        Backend(
            "tensorrt_rtx",
            "cuda",
            functional=True,
            packs=False,
            executable="trtspec.backends.tensorrt.rtx:RtxExecutable",
            compiler="trtspec.backends.tensorrt.rtx",
            extra="tensorrt-rtx",
            profiles=True,
            plugins=False,
            causal=True,
            only_attention_writes=True,
            most_bans=MAX_BANS,
            verified=_ON_GPUS - {_M.SAVE_HIDDEN_STATES, _M.DRAFT_TARGET_ONE_MODEL},
        ),
    )
}
"""Name -> backend, in the order of config.engine.BACKENDS, which lists the names."""

COMPILERS = {name: row for name, row in BACKENDS.items() if row.compiler is not None}
"""Name -> backend, for backends that have engine folders."""

USUAL_COMPILER = "aoti"
"""Backend that builds an engine folder if none of COMPILERS is named."""
