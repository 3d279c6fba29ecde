"""Settings of an engine other than its model: limits, device, dtype, backend."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import index

from trtspec.errors import ConfigError, UnsupportedError

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = (None, "int8", "int4", "int4_g64", "int4_g128")
BACKENDS = ("eager", "cuda", "aoti", "onnx", "tensorrt", "tensorrt_rtx")
AUTO = "auto"
"""An engine folder's own backend. For a checkpoint it is a compiled engine that is kept, if that is possible."""
DEVICES = ("auto", "cpu", "cuda")

_SWITCHES = ("enable_prefix_caching", "disable_overlap_scheduler", "enable_cuda_graph", "debug", "disable_log_stats")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine.

    Raises ConfigError, which names field, value and remedy. Raises UnsupportedError for what is known but not built.

    dtype: "auto" = the checkpoint's.
    quantization: that of all weights but embedding and lm_head; None = weights stay in dtype. "int8" has a scale per
    output channel, "int4" a scale and zero point per 32 inputs, "int4_g64" and "int4_g128" per 64 and 128. If the
    checkpoint is quantised already, it applies to the other linears, and must be of the checkpoint's own kind.
    lm_head_quantization: that of the lm_head, and of the embedding if both are one matrix. "int8", or None = as the
    checkpoint has it.
    backend: engine folders are of "aoti" (AOTInductor, C++ kernels), "cuda", "onnx" (ONNX Runtime), "tensorrt" or
    "tensorrt_rtx". With "aoti" a checkpoint is compiled at its first start and kept in a cache (TRTSPEC_CACHE). "eager"
    runs a checkpoint op by op, for debugging. "cuda" runs it on the GPU that torch sees first (CUDA_VISIBLE_DEVICES),
    with generations as CUDA graphs. "auto" is an engine folder's own backend. For a checkpoint it is "aoti", or "eager"
    if nothing can be compiled or kept, which the log then reports.
    device: the device that the backend runs on; it need not be set.
    max_batch_size: requests in one step.
    max_num_tokens: rows of one step of the target.
    max_seq_len: tokens of a sequence, None = the checkpoint's limit.
    max_input_len: tokens of a prompt, None = no limit of its own.
    kv_cache_memory: bytes for all KV layers, target and draft. num_kv_blocks: the same in blocks. Both None = enough
    for max_batch_size full sequences, as far as the free memory allows: a quarter of it on a CPU, what the model leaves
    on a GPU. An engine of "tensorrt" fixes the number.
    block_size: tokens per KV block.
    enable_prefix_caching: a prompt that begins like an earlier request takes over the KV blocks of that request, as far
    as they still exist.
    seed: seed of requests that bring none; None counts as 0.
    generation_config: "auto" = unset sampling fields come from the checkpoint's generation_config.json, "off" = they do
    not.
    disable_overlap_scheduler: for backend "cuda". Unless set, the host prepares a step while the last one runs, if
    drafts are made inside the launch or not at all.
    enable_cuda_graph: False runs the generation steps of "cuda" kernel by kernel, like the other steps.
    debug: account for the KV blocks after every step, not only when idle; slow.
    disable_log_stats: False logs a line of acceptance and throughput (INFO of `trtspec.stats`) for each 10 seconds in
    steps. `trtspec serve` has a line of its own.
    force_num_accepted_tokens: drafts counted as accepted per step, whatever they are. It is lossy, for benchmarks, and
    turns prefix caching off. None = the environment's TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS, where 0 means off.
    """

    dtype: str = "auto"
    device: str = "auto"
    backend: str = AUTO
    max_batch_size: int = 32
    max_num_tokens: int = 2048
    max_seq_len: int | None = None
    max_input_len: int | None = None
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    quantization: str | None = None
    lm_head_quantization: str | None = None
    enable_prefix_caching: bool = True
    seed: int | None = 0
    generation_config: str = "auto"
    disable_overlap_scheduler: bool = False
    enable_cuda_graph: bool = True
    debug: bool = False
    disable_log_stats: bool = True
    force_num_accepted_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "block_size"):
            at_least(name, getattr(self, name), 1)
        for name, least in (("max_seq_len", 1), ("max_input_len", 1), ("kv_cache_memory", 1), ("num_kv_blocks", 2)):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), least)
        if self.force_num_accepted_tokens is not None:
            at_least("force_num_accepted_tokens", self.force_num_accepted_tokens, 0)
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in _SWITCHES:
                if value not in (True, False, None):  # 1 and 0, too
                    raise ConfigError(f"{one.name} = {value!r} must be True or False")
                object.__setattr__(self, one.name, one.default if value is None else bool(value))
        try:
            object.__setattr__(self, "seed", 0 if self.seed is None else index(self.seed))
        except TypeError as error:
            raise ConfigError(f"seed = {self.seed!r} must be an integer") from error
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ConfigError(
                f"kv_cache_memory = {self.kv_cache_memory} and num_kv_blocks = {self.num_kv_blocks} say the same; "
                "give one of them"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype = {self.dtype!r}; use one of {', '.join(DTYPES)}")
        check_quantization(self.quantization)
        if self.lm_head_quantization not in (None, "int8"):
            raise ConfigError(f"lm_head_quantization = {self.lm_head_quantization!r}; use 'int8' or None")
        if self.backend not in (AUTO, *BACKENDS):
            raise UnsupportedError(f"backend = {self.backend!r} is not built; built: {', '.join((AUTO, *BACKENDS))}")
        if self.device not in DEVICES:
            raise ConfigError(f"device = {self.device!r}; use one of {', '.join(DEVICES)}")
        on_gpu = self.backend in ("cuda", "tensorrt", "tensorrt_rtx")
        if self.device != "auto" and (self.device == "cuda") != on_gpu:
            raise ConfigError(
                f"device = {self.device!r}, and backend {self.backend!r} runs on the {'GPU' if on_gpu else 'CPU'}; "
                "leave device unset, or choose another backend"
            )
        if self.generation_config not in ("auto", "off"):
            raise ConfigError(f"generation_config = {self.generation_config!r}; use 'auto' or 'off'")


def check_quantization(kind: str | None) -> None:
    """Raise ConfigError for an unknown quantisation."""
    if kind not in QUANTIZATIONS:
        raise ConfigError(f"quantization = {kind!r}; use one of {', '.join(map(repr, QUANTIZATIONS))}")


def at_least(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} = {value!r} must be an integer >= {least}")
