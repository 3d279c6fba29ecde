"""With assembly.py the only place where a name becomes an object: mode -> drafter, model -> engine, all wired up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from trtspec.backends.cuda.device import CudaQueue, free_memory, open_gpu
from trtspec.backends.table import BACKENDS
from trtspec.build.context import Assembly, Progress, load_named
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.gpu_plan import plan_gpu_blocks
from trtspec.build.kv_plan import plan_kv_blocks
from trtspec.build.speculation import map_draft_vocabulary, read_target, resolve_speculation
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.engine.batch import BatchAssembler
from trtspec.engine.core import EngineCore
from trtspec.engine.hidden_states import HiddenStateCollector, ShardWriter
from trtspec.engine.overlap import OverlapLoop
from trtspec.engine.propose import Proposer
from trtspec.engine.row_states import RowStates
from trtspec.engine.scheduler import Scheduler
from trtspec.engine.steady import SteadyLoop
from trtspec.errors import ConfigError, TrtSpecError
from trtspec.kv.blocks import BlockAllocator
from trtspec.kv.reuse import PrefixReuse
from trtspec.methods.drafter import BuildableDrafter
from trtspec.methods.hidden_states.shards import ShardFacts
from trtspec.modes import SpeculativeDecodingMode
from trtspec.ops import load_plugins
from trtspec.protocols import AsyncExecutable, Drafter
from trtspec.text import Tokenizer
from trtspec.verify.strict import get_force_num_accepted_tokens

logger = logging.getLogger(__name__)


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
    loop = (OverlapLoop if overlaps and not config.disable_overlap_scheduler else SteadyLoop)(
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
        without_edits=None if assembly.takes_edits else config.backend,
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
    return cast("type[BuildableDrafter]", load_named(path)).from_resources(assembly)


def _own_drafter(own: Any) -> Drafter:
    """From "package.module:Class", a class, or an object; ConfigError if it is no drafter, or its own code fails."""
    try:
        found = load_named(own) if isinstance(own, str) else own
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
        raise ConfigError(
            f"drafter={found!r} has no {' and no '.join(missing)}; give it the methods of protocols.Drafter"
        )
    return cast(Drafter, drafter)
