"""Compiled steps: AOTInductor graphs with the weights outside them, once for all graphs of a step.

`compile_step` writes a folder, `AotiExecutable` runs one:
    weights.safetensors      every constant of the graphs under its name there, packed as the kernels read it
    step_k<K>.pt2            for each K asked for: verifies K drafts a request and makes K for the next step
and a `CompiledStep` says what is in it.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtspec.backends.export import Step, export_step, graph_reader, input_names
from trtspec.core import (
    AttnMetadata,
    KVLayer,
    PhaseMethod,
    Proposal,
    SamplingTensors,
    SpecMetadata,
    StepInputs,
    StepOutputs,
    Verdict,
)
from trtspec.errors import CheckpointError, DependencyError, EngineError
from trtspec.ops import graph_calls
from trtspec.sampling_params import ResolvedSampling

WEIGHTS = "weights.safetensors"

_INDUCTOR = {
    "aot_inductor.package_constants_in_so": False,  # weights once, beside all graphs
    "emulate_precision_casts": True,  # round to bf16 where eager does
    # What is between our ops is a few rows of elementwise work: waking threads for it costs more than it saves.
    "cpp.threads": 1,
}

_DTYPES = {
    "input_ids": torch.int64,
    "kv_lens": torch.int32,
    "block_tables": torch.int32,
    "tree_mask": torch.int32,
    "seq_lens": torch.int32,
    "gather_ids": torch.int64,
    "draft_tokens": torch.int64,
    "draft_lens": torch.int32,
    "next_prompt_token": torch.int64,
    "forced_accept": torch.int32,
    "greedy": torch.bool,
    "positions": torch.int64,
    "seeds": torch.int64,
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "min_ps": torch.float32,
    "ban_ids": torch.int32,
    "ban_until": torch.int64,
}
_SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_ALIGNMENT = 64  # bytes: a cache line, a vector register
_READ_AT_ONCE = 16 * 2**20  # bytes
_READERS = 4

# A graph takes every sampling field, so one that no row of the batch uses is filled with what changes nothing.
_NEUTRAL = {"seeds": 0, "temperatures": 0, "top_ks": 0, "top_ps": 1, "min_ps": 0, "ban_ids": -1, "ban_until": 0}


@dataclass(frozen=True)
class Graph:
    """One .pt2 file: verifies up to `draft_len` drafts a request and makes `draft_len` for the next step."""

    file: str
    draft_len: int


@dataclass(frozen=True)
class CompiledStep:
    """What a folder made by `compile_step` holds; plain data, written into the engine's config.json."""

    graphs: tuple[Graph, ...]  # by draft_len
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kv: tuple[tuple[int, int], ...]  # (kv heads, head size) of each KV layer
    dtype: str  # of KV
    vocab_size: int
    weight_bytes: int  # that one launch reads
    needs_kernels: bool  # graphs call the C++ kernels themselves

    def to_dict(self) -> dict[str, Any]:
        """For json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompiledStep:
        """The inverse of to_dict. CheckpointError if it is not that."""
        try:
            graphs = tuple(Graph(g["file"], g["draft_len"]) for g in data["graphs"])
            kv = tuple((heads, size) for heads, size in data["kv"])
            rest = {name: data[name] for name in ("dtype", "vocab_size", "weight_bytes", "needs_kernels")}
            return cls(graphs, tuple(data["inputs"]), tuple(data["outputs"]), kv, **rest)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the engine's config.json does not describe its graphs ({error!r}); rebuild it"
            ) from error


# -- building ---------------------------------------------------------------------------------------------------------


def example_batch(draft_len: int, block_size: int) -> StepInputs:
    """Two contexts and two generations with `draft_len` drafts each: an example with two or more of everything."""
    K = draft_len
    q_lens, kv_lens = [3, 2, K + 1, K + 1], [3, 6, K + 9, K + 12]
    blocks = -(-max(kv_lens) // block_size) + 1
    attn = AttnMetadata.of(q_lens, kv_lens, [[1 + b * blocks + i for i in range(blocks)] for b in range(4)])
    starts = attn.cu_q_lens.tolist()
    gather = [starts[1] - 1, starts[2] - 1, *range(starts[2], starts[4])]
    how = ResolvedSampling(
        greedy=False, temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, seed=1, ban_ids=(1, 2), ban_until=1
    )
    spec = replace(
        SpecMetadata.plain((), attn, SamplingTensors.of([how] * len(gather), gather)),
        gather_ids=torch.tensor(gather),
        draft_tokens=torch.zeros(2, K, dtype=torch.int64),
        draft_lens=torch.tensor([0, 0, K, K], dtype=torch.int32),
        next_prompt_token=torch.tensor([-1, 3, -1, -1]),
        next_draft_len=K,
    )
    return StepInputs(torch.ones(starts[-1], dtype=torch.int64), attn, spec)


def compile_step(
    step: Step,
    kv_shapes: Sequence[tuple[int, int]],
    block_size: int,
    draft_lens: Sequence[int],
    folder: Path,
    report: Callable[[str], None] = lambda what: None,
) -> CompiledStep:
    """Compile `step` for each K of `draft_lens` into `folder` (it must exist). `report` hears what is being done."""
    dtype = step.decoder.norm.weight.dtype
    weights: dict[str, Tensor] = {}
    graphs = []
    direct = graph_calls()
    for K in sorted(draft_lens):
        report(f"graph for K = {K}: tracing")
        example = example_batch(K, block_size)
        blocks = int(example.attn.block_tables.max()) + 1
        kv = [tuple(torch.zeros(blocks, block_size, h, d, dtype=dtype) for _ in "kv") for h, d in kv_shapes]
        program = export_step(step, example, cast("list[KVLayer]", kv))
        report(f"graph for K = {K}: compiling")
        file = folder / f"step_k{K}.pt2"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {**_INDUCTOR, "aot_inductor.custom_ops_to_c_shims": direct}
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
        constants = {**program.state_dict, **program.constants}
        runner = torch._inductor.aoti_load_package(str(file))
        weights |= {name: constants[name].detach() for name in runner.get_constant_fqns()}
        graphs.append(Graph(file.name, K))
    report("writing weights")
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / WEIGHTS)
    return CompiledStep(
        graphs=tuple(graphs),
        inputs=input_names(step),
        outputs=step.outputs,
        kv=tuple(kv_shapes),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=step.decoder.spec.vocab_size,
        weight_bytes=step.weight_bytes_per_step,
        needs_kernels=bool(direct),
    )


# -- running ----------------------------------------------------------------------------------------------------------


def load_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file in one arena of huge pages: TLB misses cost up to a tenth of the bandwidth."""
    with file.open("rb", buffering=0) as source:
        header_size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(header_size))
        header.pop("__metadata__", None)
        size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        arena = _arena(max(size + _ALIGNMENT * len(header), 1))
        tensors, parts, end = {}, [], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
            tensors[name] = torch.frombuffer(arena, dtype=dtype, count=(last - first) // dtype.itemsize, offset=end)
            tensors[name] = tensors[name].view(entry["shape"])
            for start in range(first, last, _READ_AT_ONCE):
                view = memoryview(arena)[end + start - first : end + min(start + _READ_AT_ONCE, last) - first]
                parts.append((name, 8 + header_size + start, view))
            end += -(-(last - first) // _ALIGNMENT) * _ALIGNMENT

        def read(part: tuple[str, int, memoryview]) -> None:
            name, offset, view = part
            while view:
                count = os.preadv(source.fileno(), [view], offset)
                if not count:
                    raise CheckpointError(f"{file} ends before the end of tensor {name}; rebuild the engine")
                view, offset = view[count:], offset + count

        with ThreadPoolExecutor(_READERS) as pool:  # most of it is copying, and giving out zeroed pages
            list(pool.map(read, parts))
    return tensors


def _arena(size: int) -> mmap.mmap:
    """Zeroed memory of `size` bytes, in huge pages where the system has them: private, as shared memory has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


class AotiExecutable:
    """The graphs of a compiled step, its weights and its KV layers. See core.Executable.

    Raises EngineError for inputs a graph would misread: AOTInductor checks none of them.
    """

    def __init__(self, compiled: CompiledStep, folder: Path, kv: Sequence[KVLayer]) -> None:
        self.compiled = compiled
        self.kv = kv
        if compiled.needs_kernels and not graph_calls():
            raise DependencyError(
                f"engine {folder.parent} calls the C++ kernels, which are not built here; run "
                "build_scripts/build_plugins.py, or rebuild the engine"
            )
        self._flat_kv = [tensor for layer in kv for tensor in layer]
        self._weights = load_weights(folder / WEIGHTS)  # the graphs point into these
        self._graphs = [(graph.draft_len, self._load(folder / graph.file)) for graph in compiled.graphs]
        self._drafts = "draft_tokens" in compiled.inputs
        self._read = graph_reader(compiled.inputs)
        self._dtypes = [_DTYPES[name] for name in compiled.inputs]
        self._optional = [(i, name) for i, name in enumerate(compiled.inputs) if name in _NEUTRAL]
        num_blocks, block_size = kv[0][0].shape[:2]
        ranges = {
            "input_ids": (0, compiled.vocab_size - 1),
            "block_tables": (0, num_blocks - 1),
            "kv_lens": (1, num_blocks * block_size),
            "next_prompt_token": (-1, compiled.vocab_size - 1),
        }
        self._ranges = [(i, *ranges[name]) for i, name in enumerate(compiled.inputs) if name in ranges]
        self._last_layout: tuple[tuple[Tensor, ...], list[int], int] = (), [], -1
        self._neutral = {name: torch.empty(0) for name in _NEUTRAL}
        self._last_draft_lens = (0, 0), torch.empty(0, dtype=torch.int32)  # (B, K) and B times K

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One launch; see core.Executable."""
        spec = inputs.spec
        wanted = max(spec.runtime_draft_len, spec.next_draft_len) if self._drafts else 0
        graph = next((run for K, run in self._graphs if wanted <= K), None)
        if graph is None:
            raise EngineError(
                f"the engine has graphs for K up to {self._graphs[-1][0]}, a step wants {wanted}; rebuild it"
            )
        outputs = graph([*self._checked(inputs), *self._flat_kv])
        return self._outputs(dict(zip(self.compiled.outputs, outputs, strict=True)), spec)

    def phases(self) -> Sequence[PhaseMethod]:
        """See core.Executable: the graph itself is one piece."""
        return (self, "_checked", "inputs"), (self, "_outputs", "deliver")

    def _load(self, file: Path) -> Callable[[list[Tensor]], list[Tensor]]:
        # not torch._inductor.aoti_load_package: importing that module, which is for compiling, takes two seconds
        model = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1)
        constants = {name: self._weights[name] for name in model.get_constant_fqns()}
        model.load_constants(constants, False, True, True)  # all of them, user-managed: the graph keeps our memory
        return cast("Callable[[list[Tensor]], list[Tensor]]", model.run)

    def _checked(self, inputs: StepInputs) -> list[Tensor]:
        tensors = list(self._read(inputs))
        rows = inputs.spec.gather_ids.shape[0]
        for i, name in self._optional:
            if tensors[i].numel() == 0:
                tensors[i] = self._filled(name, rows)
        dtypes = [tensor.dtype for tensor in tensors]
        if dtypes != self._dtypes or not all(map(Tensor.is_contiguous, tensors)):
            for name, tensor in zip(self.compiled.inputs, tensors, strict=True):
                if tensor.dtype != _DTYPES[name] or not tensor.is_contiguous():
                    raise EngineError(
                        f"{name} is {tensor.dtype} with strides {tensor.stride()}; a graph takes contiguous "
                        f"{_DTYPES[name]}"
                    )
        for i, lowest, highest in self._ranges:
            self._check_range(self.compiled.inputs[i], tensors[i], lowest, highest)
        self._check_layout(inputs)
        return tensors

    def _check_range(self, name: str, tensor: Tensor, lowest: int, highest: int) -> None:
        low, high = map(int, torch.aminmax(tensor))
        if low < lowest or high > highest:
            raise EngineError(f"{name} holds {low}..{high}; allowed are {lowest}..{highest}")

    def _check_layout(self, inputs: StepInputs) -> None:
        """seq_lens and gather_ids. The very tensors of the last launch, unwritten since, are not read again."""
        rows, tensors = inputs.input_ids.shape[0], (inputs.spec.seq_lens, inputs.spec.gather_ids)
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        last, last_versions, last_rows = self._last_layout
        written = -1 in versions or versions != last_versions
        if not written and rows == last_rows and all(map(operator.is_, tensors, last)):
            return
        seq_lens, gather_ids = tensors
        if int(seq_lens.min()) < 1 or int(seq_lens.sum()) != rows:
            raise EngineError(f"seq_lens is {seq_lens.tolist()}, not 1 or more each and {rows}, the input_ids, in all")
        self._check_range("gather_ids", gather_ids, 0, rows - 1)
        self._last_layout = tensors, versions, rows

    def _filled(self, name: str, rows: int) -> Tensor:
        if self._neutral[name].shape[0] != rows:
            shape = (rows, 1) if name.startswith("ban") else (rows,)
            self._neutral[name] = torch.full(shape, _NEUTRAL[name], dtype=_DTYPES[name])
        return self._neutral[name]

    def _outputs(self, named: dict[str, Tensor], spec: SpecMetadata) -> StepOutputs:
        K = spec.next_draft_len
        if "new_tokens" not in named:
            return StepOutputs(named["tokens"], hidden_states=named.get("hidden_states"))
        drafts, new_tokens = named["next_draft_tokens"], named["next_new_tokens"]
        if drafts.shape[1] != K:  # the graph makes more
            drafts, new_tokens = drafts[:, :K], new_tokens[:, : K + 1]
        return StepOutputs(
            named["tokens"],
            Verdict(named["new_tokens"], named["num_tokens"]),
            Proposal(drafts, self._draft_lens(spec.batch_size, K)),
            next_new_tokens=new_tokens,
            next_kv_lens=named["next_kv_lens"],
        )

    def _draft_lens(self, batch_size: int, draft_len: int) -> Tensor:
        """[B] int32, all `draft_len`."""
        key = (batch_size, draft_len)
        if self._last_draft_lens[0] != key:
            self._last_draft_lens = key, torch.full((batch_size,), draft_len, dtype=torch.int32)
        return self._last_draft_lens[1]
