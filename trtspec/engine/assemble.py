"""The only place where a name becomes an object: mode -> drafter, backend -> executable, folder -> model."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from trtspec.backends.chain_graph import ChainOnCuda
from trtspec.backends.compiled import CompiledStep
from trtspec.backends.cudagraph import CudaExecutable, LaunchLimits, ModuleOnCuda, module_graphs
from trtspec.backends.device import CudaQueue, WorkQueue, free_memory, open_gpu
from trtspec.backends.eager import EagerExecutable
from trtspec.backends.export import graph_draft_lens
from trtspec.backends.table import BACKENDS
from trtspec.backends.tensorrt_profiles import Sizes
from trtspec.config.checkpoint import CheckpointConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.engine_folder import EngineFolder
from trtspec.config.model import ModelConfig
from trtspec.config.resolved import ResolvedSpeculation
from trtspec.config.speculative import SpeculativeConfig
from trtspec.core import AsyncExecutable, Drafter, Executable, KVLayer
from trtspec.drafters.base import BuildableDrafter, ChainExecutable, DraftModel
from trtspec.engine.batch import BatchAssembler
from trtspec.engine.core import EngineCore
from trtspec.engine.gpu_plan import plan_gpu_blocks
from trtspec.engine.hidden_states import HiddenStateCollector, ShardWriter
from trtspec.engine.kv_plan import plan_kv_blocks
from trtspec.engine.overlap import OverlapLoop
from trtspec.engine.propose import Proposer
from trtspec.engine.row_states import RowStates
from trtspec.engine.scheduler import Scheduler
from trtspec.engine.speculation import map_draft_vocabulary, read_target, resolve_speculation
from trtspec.engine.stats import TimedAsyncExecutable, TimedChain, TimedExecutable
from trtspec.engine.step import StepLoop
from trtspec.errors import ConfigError, TrtSpecError, UnsupportedError
from trtspec.kv.blocks import BlockAllocator
from trtspec.kv.pool import allocate_layers, allocate_on, kv_nbytes
from trtspec.kv.reuse import PrefixReuse
from trtspec.models.decoder import Decoder
from trtspec.models.heads import DraftHead, LoadHead
from trtspec.models.hidden_shards import ShardFacts
from trtspec.models.layers import norms_as_ops
from trtspec.models.packing import pack_decoder
from trtspec.models.weights import DTYPES, describe_decoder, load_decoder
from trtspec.modes import SpeculativeDecodingMode
from trtspec.ops import load_plugins
from trtspec.text import Tokenizer
from trtspec.text.vocabulary import VocabularyMap
from trtspec.verify.strict import get_force_num_accepted_tokens
from trtspec.workers.base import BuildableWorker
from trtspec.workers.heads import HeadWorker
from trtspec.workers.step import CaptureStep, DecodeStep, HeadStep, OneEngineStep, Step
from trtspec.workers.translated import TranslatedStep

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass
class Assembly:
    """Everything about to become an engine; also what a drafter (drafters.base.DraftResources) or a worker
    (workers.base.WorkerResources) is built from."""

    config: EngineConfig
    target: ModelConfig
    draft: CheckpointConfig | None  # a ModelConfig where it is a decoder
    resolved: ResolvedSpeculation | None
    max_seq_len: int
    pack: bool  # weights are kept in the kernels' layout
    functional: bool = False  # steps change no KV tensor in place
    reads_weights: bool = True  # False: steps are on torch's meta device, for plans
    symmetric: bool = False  # what is quantised to 4 bits has no zero points
    vocabulary: VocabularyMap | None = None  # of a draft that has another than the target
    built: EngineFolder | None = None  # where graphs and weights come from, if not from the checkpoints
    gpu: WorkQueue | None = None  # where steps run, if not on the CPU
    float_panels: bool = True  # False: what is not quantised stays as it is, as a GPU's kernels want it
    report: Progress = lambda message: None
    num_blocks: int = 0
    target_decoder: Decoder | None = None  # once it is there
    executables: list[TimedExecutable] = field(default_factory=list)
    chain: ChainExecutable | None = None  # of the draft model, once it is there, if its backend has one
    graph_draft_lens: tuple[int, ...] = ()  # K of the target's graphs; empty: any K
    head_draft_lens: tuple[int, ...] = ()  # likewise of draft layers beside it

    @property
    def speculation(self) -> ResolvedSpeculation:
        assert self.resolved is not None
        return self.resolved

    @property
    def mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.NONE if self.resolved is None else self.resolved.mode

    @property
    def max_draft_len(self) -> int:
        """K that a step verifies at most."""
        if self.resolved is None or self.mode.is_save_hidden_states():
            return 0
        return self.resolved.num_speculative_tokens

    @property
    def provisional_rows(self) -> int:
        """See kv.reuse: each MTP module reads one token further on than the one before."""
        return self.max_draft_len - 1 if self.mode.is_mtp_vanilla() else 0

    @property
    def max_num_tokens(self) -> int:
        return self.config.max_num_tokens

    def dtype(self, model: ModelConfig) -> torch.dtype:
        """What the model computes in."""
        return DTYPES[model.dtype if self.config.dtype == "auto" else self.config.dtype]

    def target_step(self) -> Step:
        """The target, with the mode's worker in its graph if it has one."""
        self.target_decoder = decoder = self._decoder(self.target, "target")
        path = None if self.resolved is None else self.resolved.mode.traits.worker
        if self.mode.is_save_hidden_states() or self.mode.reads_hidden_states():
            layers = self.speculation.capture_layers
            if self.mode.is_save_hidden_states():
                layers = (*layers, -1)
            return self._packed(CaptureStep(decoder, layers, self.functional))
        if path is None:
            return self._packed(DecodeStep(decoder, self.functional))
        worker = cast("type[BuildableWorker]", _load(path)).from_resources(self, decoder)
        return self._packed(OneEngineStep(decoder, worker, self.functional), worker)

    def draft_step(self) -> Step:
        """The draft checkpoint, or the mode's head, as a model of its own; after the target's."""
        if self.mode.reads_hidden_states():
            assert self.target_decoder is not None
            worker, target = HeadWorker.from_resources(self, self.target_decoder), self.target_decoder
            width = len(self.speculation.capture_layers) * target.spec.hidden_size
            return self._packed(HeadStep(worker, width, target.norm.weight, self.functional), worker)
        assert isinstance(self.draft, ModelConfig)
        decoder = self._decoder(self.draft, "draft")
        if self.vocabulary is not None:
            return self._packed(TranslatedStep(decoder, self.vocabulary, self.functional), decoder)
        return self._packed(DecodeStep(decoder, self.functional), decoder)

    @property
    def first_draft_layer(self) -> int:
        """See models.heads.HeadResources."""
        return 0 if self.mode.reads_hidden_states() else self.target.num_layers

    def load_head(self, target: Decoder) -> DraftHead:
        """See workers.base.WorkerResources."""
        path = self.mode.traits.head
        assert path is not None
        return cast("LoadHead", _load(path))(self, target)

    def _decoder(self, model: ModelConfig, role: str) -> Decoder:
        make = load_decoder if self.reads_weights else describe_decoder
        return make(model, self.dtype(model), role, self.max_seq_len)

    def _packed(self, step: Step, draft: nn.Module | None = None) -> Step:
        """The step with its weights as the kernels want them, those of `draft` quantised as speculation asks."""
        if self.pack or self.quantizations != (None, None):
            target_kind, draft_kind = self.quantizations
            try:
                pack_decoder(step, target_kind, draft, draft_kind, self.symmetric, self.float_panels)
            except ValueError as error:
                kinds = f"quantization = {target_kind!r}, of the draft {draft_kind!r}"
                raise UnsupportedError(f"{kinds}: {error}") from error
        return step

    @property
    def quantizations(self) -> tuple[str | None, str | None]:
        """Of target and draft."""
        own = None if self.resolved is None else self.resolved.quantization
        return self.config.quantization, own

    def target_model(self) -> Executable:
        """What verifies, on the configured backend."""
        return self._module(self.target_step()) if self.built is None else self._compiled(self.built, "target")

    def draft_model(self) -> DraftModel:
        """See drafters.base.DraftResources."""
        draft = self._module(self.draft_step()) if self.built is None else self._compiled(self.built, "draft")
        return DraftModel(draft, self.chain, self.head_draft_lens)

    def _module(self, step: Step) -> Executable:
        shapes, dtype = step.kv_shapes, step.like.dtype
        if self.gpu is not None:
            step.to(self.gpu.device)
            norms_as_ops(step)
            kv = allocate_on(self.gpu.device, shapes, self.num_blocks, self.config.block_size, dtype)
            compiled = module_graphs(step, self._module_draft_lens(step), self.config.enable_cuda_graph)
            return self._graphed(ModuleOnCuda(step, compiled, kv, self.gpu, self._limits()))
        kv = allocate_layers(shapes, self.num_blocks, self.config.block_size, dtype)
        return self._timed(EagerExecutable(step, kv), step.weight_bytes_per_step, kv)

    def _module_draft_lens(self, step: Step) -> Sequence[int]:
        """K that a launch of it may be asked for."""
        own = graph_draft_lens(step, self.resolved)
        if own != (0,) or self.executables:  # a draft beside the target, which comes first
            return own
        return range(self.max_draft_len + 1)

    def _limits(self) -> LaunchLimits:
        sizes = Sizes.of(self.config, self.max_seq_len, self.max_draft_len, self.num_blocks)
        return LaunchLimits(sizes.batch_size, sizes.columns)

    def _graphed(self, executable: CudaExecutable) -> Executable:
        role = "draft" if self.executables else "target"  # which comes first

        def report(done: int, total: int) -> None:
            self.report(f"capturing CUDA graphs of the {role}: {done} of {total}")

        timed = TimedAsyncExecutable(executable, executable.compiled.weight_bytes, kv_nbytes(executable.kv))
        self.executables.append(timed)
        self._learn_draft_lens(executable.compiled)
        if role == "draft" and self.config.enable_cuda_graph and not executable.compiled.makes_drafts:
            assert self.gpu is not None
            chain = ChainOnCuda(executable, self.gpu, self._limits(), self.max_draft_len)
            chain.capture(report)  # in place of graphs of one pass, which are seldom asked for
            self.chain = TimedChain(chain, timed)
        else:
            executable.capture(report)
        return timed

    def _compiled(self, built: EngineFolder, role: str) -> Executable:
        compiled = CompiledStep.from_dict(built.data["executables"][role])
        executable = BACKENDS[built.backend].load_executable()
        executable.check(compiled)
        if self.gpu is not None:
            dtype = DTYPES[compiled.dtype]
            there = allocate_on(self.gpu.device, compiled.kv, self.num_blocks, self.config.block_size, dtype)
            graphed = cast("type[CudaExecutable]", executable)
            return self._graphed(graphed(compiled, built.path / role, there, self.gpu, self._limits()))
        kv = executable.allocate_kv(compiled, self.num_blocks, self.config.block_size, DTYPES[compiled.dtype])
        self._learn_draft_lens(compiled)
        return self._timed(executable(compiled, built.path / role, kv), compiled.weight_bytes, kv)

    def _learn_draft_lens(self, compiled: CompiledStep) -> None:
        if compiled.verifies:
            self.graph_draft_lens = compiled.draft_lens
        elif compiled.makes_drafts:
            self.head_draft_lens = compiled.draft_lens

    def _timed(self, executable: Executable, weight_bytes: int, kv: Sequence[KVLayer]) -> Executable:
        self.executables.append(TimedExecutable(executable, weight_bytes, kv_nbytes(kv)))
        return self.executables[-1]


def plan_assembly(
    model: str | Path | EngineFolder,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    pack: bool,
    functional: bool = False,
    reads_weights: bool = True,
    symmetric: bool = False,
) -> Assembly:
    """Read the configs and check that they fit together; nothing is loaded yet.

    An engine folder brings its own speculation; one that has none takes a drafter that needs no graph.
    """
    built = model if isinstance(model, EngineFolder) else None
    own = None
    if built is not None:
        own = built.speculative_config()
        if own is not None and speculative is not None:
            raise ConfigError(
                f"engine {built.path} was built with its own speculation; leave speculative_config unset, or build "
                "another engine"
            )
    target = read_target(built.path / "target" if built is not None else cast("str | Path", model))
    max_seq_len = config.max_seq_len or target.max_seq_len
    if max_seq_len > target.max_seq_len:
        raise ConfigError(f"max_seq_len = {max_seq_len} exceeds the checkpoint's {target.max_seq_len}; lower it")
    draft, resolved = resolve_speculation(own or speculative, target, max_seq_len, config)
    if built is not None and own is None and resolved is not None and resolved.mode.shapes_graphs():
        raise ConfigError(
            f"engine {built.path} was built without speculation, and {resolved.mode.name} needs graphs of its own; "
            "build an engine with it: trtspec build --speculative_decoding_mode"
        )
    if resolved is not None and config.backend in BACKENDS:
        BACKENDS[config.backend].check_mode(resolved.mode, resolved.num_speculative_tokens)
    vocabulary = None
    if built is None and isinstance(draft, ModelConfig) and resolved is not None and resolved.use_heterogeneous_vocab:
        vocabulary = map_draft_vocabulary(target, draft)
    assembly = Assembly(
        config, target, draft, resolved, max_seq_len, pack, functional, reads_weights, symmetric, vocabulary, built
    )
    for role, checkpoint, kind in zip(("target", "draft"), (target, draft), assembly.quantizations, strict=True):
        if checkpoint is not None and checkpoint.quantization is not None:
            checkpoint.quantization.check_request(kind, role)
    K = assembly.max_draft_len
    if assembly.provisional_rows >= config.block_size:
        raise ConfigError(
            f"block_size = {config.block_size} is too small for MTP with {K} modules, as KV depends on so many tokens "
            f"further on; raise it to {K} or more, or lower num_speculative_tokens"
        )
    if config.max_num_tokens < config.max_batch_size * (K + 1):
        raise ConfigError(
            f"max_num_tokens = {config.max_num_tokens} cannot hold {K + 1} rows for each of max_batch_size = "
            f"{config.max_batch_size} requests; raise it to {config.max_batch_size * (K + 1)} or lower max_batch_size"
        )
    return assembly


def assemble_engine(
    model: str | Path | EngineFolder,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    progress: Progress = lambda message: None,
) -> EngineCore:
    """Load, plan memory, wire up. `model` is a checkpoint or an engine. `progress` hears what is being done."""
    if config.backend not in ("eager", "cuda") and not isinstance(model, EngineFolder):
        raise ConfigError(
            f"backend = {config.backend!r} runs engine folders, {model} is a checkpoint; build an engine first: "
            f"trtspec build --checkpoint_dir {model} --output_dir DIR --backend {config.backend}"
        )
    on_gpu = config.backend == "cuda"
    gpu = open_gpu() if on_gpu else None
    assembly = plan_assembly(model, speculative, config, pack="cpu" in load_plugins() and not on_gpu)
    assembly.report, assembly.float_panels = progress, not on_gpu
    mode, target, draft, resolved = assembly.mode, assembly.target, assembly.draft, assembly.resolved
    K = assembly.max_draft_len
    drafting = resolved if K else None
    if gpu is None:
        assembly.num_blocks = plan_kv_blocks(assembly)
    else:
        assembly.num_blocks = plan_gpu_blocks(assembly, free_memory(gpu))
        assembly.gpu = CudaQueue()
    collector = hidden_state_collector(assembly)  # complains before anything is loaded

    progress(f"loading {target.path}")
    executable = assembly.target_model()
    if draft is not None:
        progress(f"loading {draft.path}")
    drafter = build_drafter(assembly)
    forced = config.force_num_accepted_tokens
    if forced is None:
        forced = get_force_num_accepted_tokens() or -1
    if forced >= 0:
        logger.warning("acceptance is forced to %d drafts a step: the output is NOT the model's (lossy)", forced)
    allocator = BlockAllocator(assembly.num_blocks, config.block_size, config.debug)
    provisional = assembly.provisional_rows
    reuse = prefix_reuse(allocator, mode, provisional) if config.enable_prefix_caching and forced < 0 else None
    reads = mode.reads_hidden_states()
    ahead = mode.rows_ahead(K)
    scheduler = Scheduler(allocator, config.max_batch_size, config.max_num_tokens, ahead, reuse, reads, provisional)
    # Who looks at tokens or states on the host between two steps cannot let the next one start before.
    overlaps = assembly.gpu is not None and drafter is None and collector is None
    loop = (OverlapLoop if overlaps and not config.disable_overlap_scheduler else StepLoop)(
        scheduler,
        BatchAssembler(mode, K, forced, assembly.graph_draft_lens),
        cast("AsyncExecutable", executable),
        Proposer(drafter, drafting, target.vocab_size, RowStates() if reads else None),
        target.vocab_size,
        collector,
    )
    return EngineCore(
        loop,
        target,
        tokenizer,
        assembly.max_seq_len,
        config.max_input_len,
        config.seed,
        use_generation_config=config.generation_config == "auto",
        executables=assembly.executables,
        debug=config.debug,
    )


def hidden_state_collector(assembly: Assembly) -> HiddenStateCollector | None:
    """For SAVE_HIDDEN_STATES; its folder is claimed here. ConfigError where it cannot be used."""
    if not assembly.mode.is_save_hidden_states():
        return None
    speculation, target = assembly.speculation, assembly.target
    assert speculation.output_directory is not None
    dtype = str(assembly.dtype(target)).removeprefix("torch.")
    facts = ShardFacts(speculation.capture_layers, target.hidden_size, dtype)
    folder = Path(speculation.output_directory)
    return HiddenStateCollector(ShardWriter(folder, speculation.file_prefix, speculation.write_interval, facts))


def prefix_reuse(allocator: BlockAllocator, mode: SpeculativeDecodingMode, provisional: int = 0) -> PrefixReuse:
    """What the mode allows to share."""
    return PrefixReuse(
        allocator,
        keeps_draft_kv=mode.use_one_engine() or mode.has_draft_model(),
        shifted=mode.draft_kv_is_shifted(),
        provisional=provisional,
    )


def build_drafter(assembly: Assembly) -> Drafter | None:
    """The drafter that the mode's row names, or the user's own."""
    if assembly.resolved is None:
        return None
    mode = assembly.resolved.mode
    if mode.is_user_provided():
        return _own_drafter(assembly.resolved.drafter)
    path = mode.traits.drafter
    if path is None:
        return None
    return cast("type[BuildableDrafter]", _load(path)).from_resources(assembly)


def _own_drafter(own: Any) -> Drafter:
    """From "package.module:Class", a class, or an object; ConfigError if it is no drafter, or its own code fails."""
    try:
        found = _load(own) if isinstance(own, str) else own
        drafter = found() if isinstance(found, type) else found
    except TrtSpecError:
        raise
    except Exception as error:
        raise ConfigError(
            f"drafter={own!r} cannot be made ({type(error).__name__}: {error}); correct it, or give the object "
            "itself: a class is called without arguments"
        ) from error
    missing = [name for name in ("propose", "forget") if not callable(getattr(drafter, name, None))]
    if missing:
        raise ConfigError(f"drafter={found!r} has no {' and no '.join(missing)}; give it the methods of core.Drafter")
    return cast(Drafter, drafter)


def _load(path: str) -> Any:
    """ "package.module:Name" -> the object; ConfigError if there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'{path!r} cannot be loaded ({error}); give "package.module:Class"') from error
