"""Assemble an engine from its models, its drafter and its loop.

Only modules of this folder turn names of methods and backends into objects.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from trtspec.backends.cuda.device import CudaQueue, free_memory, open_gpu, require_kernels
from trtspec.backends.table import BACKENDS
from trtspec.build.context import BuildContext, plan_context
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.gpu_plan import plan_gpu_blocks
from trtspec.build.kv_plan import plan_kv_blocks
from trtspec.build.models import LoadedModel, ModelLoader, Progress
from trtspec.build.start import Start, choose_start
from trtspec.build.step_times import step_costs
from trtspec.config.engine import EngineConfig
from trtspec.config.speculation_plan import scheduled_draft_lens
from trtspec.config.speculative import SpeculativeConfig
from trtspec.engine.batch import InputBuilder
from trtspec.engine.core import EngineCore
from trtspec.engine.draft_length import DraftLength
from trtspec.engine.hidden_states import HiddenStateCollector, ShardWriter
from trtspec.engine.limits import LogitLimits
from trtspec.engine.observed_costs import ObservedCosts
from trtspec.engine.overlap import OverlapLoop
from trtspec.engine.propose import Proposer
from trtspec.engine.row_states import RowStates
from trtspec.engine.scheduler import Scheduler
from trtspec.engine.steady import SteadyLoop
from trtspec.engine.step_costs import StepCosts
from trtspec.kv.blocks import BlockAllocator
from trtspec.kv.reuse import PrefixReuse
from trtspec.methods.drafter import BuildDrafter, DraftModel
from trtspec.methods.hidden_states.options import HiddenStatesOptions
from trtspec.methods.hidden_states.shards import ShardMetadata
from trtspec.methods.ngram.repeats import RepeatLookups
from trtspec.methods.table import method_of
from trtspec.modes import SpeculativeDecodingMode
from trtspec.ops import load_plugins
from trtspec.protocols import AsyncExecutable, Drafter, LearningDrafter
from trtspec.text import Tokenizer
from trtspec.verify.strict import get_force_num_accepted_tokens

logger = logging.getLogger(__name__)


def create_engine(
    model: str | Path | EngineFolder,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    progress: Progress = lambda message: None,
    detail: Progress = lambda message: None,
) -> EngineCore:
    """Load the models, plan the memory and assemble the engine.

    model: a checkpoint or an engine folder. progress: is called with a line for each stage. detail: is called with the
    steps of compiling, if a checkpoint is compiled first.
    """

    def start_engine(again: bool) -> EngineCore:
        start = choose_start(model, speculative, config, progress, detail, _check)
        try:
            engine = _create_engine(start, tokenizer, progress)
        except BaseException as error:
            damaged = again and start.damaged(error)
            start.release()
            if damaged:
                return start_engine(False)
            raise
        engine.on_close = start.release
        return engine

    return start_engine(True)


def _check(context: BuildContext) -> None:
    """Raise the errors that loading would raise, before minutes of compiling."""
    plan_kv_blocks(context)
    collector = hidden_state_collector(context)
    if collector is not None:
        collector.close()


def _create_engine(start: Start, tokenizer: Tokenizer | None, progress: Progress) -> EngineCore:
    config, plugins = start.config, load_plugins()
    backend = BACKENDS[config.backend]
    gpu = open_gpu() if backend.torch_gpu else None
    if gpu is not None:
        require_kernels(gpu)
    context = plan_context(start.model, start.speculative, config, backend, backend.packs and "cpu" in plugins)
    mode, target, spec_plan = context.mode, context.target, context.spec_plan
    N = context.max_total_draft_tokens
    num_blocks = plan_kv_blocks(context) if gpu is None else plan_gpu_blocks(context, free_memory(gpu))
    collector = hidden_state_collector(context)  # raises before anything is loaded

    loader = ModelLoader(num_blocks, None if gpu is None else CudaQueue(), progress)
    loaded: list[LoadedModel] = []
    for one in map(context.of, context.roles):
        progress(f"loading {' and '.join(map(str, one.folders))}")
        loaded.append(loader.load(one, *loaded))
    drafter = build_drafter(context, loaded[1] if mode.has_draft_model() else None)
    forced = config.force_num_accepted_tokens
    if forced is None:
        forced = get_force_num_accepted_tokens() or -1
    if forced >= 0:
        logger.warning("acceptance is forced to %d drafts a step: the output is NOT the model's (lossy)", forced)
    allocator = BlockAllocator(num_blocks, config.block_size, config.debug)
    provisional = context.provisional_rows
    reuse = prefix_reuse(allocator, mode, provisional) if config.enable_prefix_caching and forced < 0 else None
    reads = mode.reads_hidden_states()
    ahead, branches = (0, 0) if spec_plan is None or not N else (spec_plan.rows_ahead, spec_plan.branch_rows)
    scheduler = Scheduler(
        allocator, config.max_batch_size, config.max_num_tokens, ahead, reuse, reads, provisional, branches
    )
    # Where the host drafts, or a collector reads states, between two steps, the next one must wait.
    looks_up = spec_plan is not None and spec_plan.sa_threshold is not None
    alone = (not N or (mode.use_one_engine() and not looks_up)) and collector is None
    overlaps = gpu is not None and alone and not config.disable_overlap_scheduler
    if overlaps and spec_plan is not None and spec_plan.draft_confidence_threshold is not None:
        logger.warning(
            "draft_confidence_threshold=%g loses accepted drafts and saves nothing: on a GPU the rows of a step are "
            "laid out before its drafts are known; leave it unset",
            spec_plan.draft_confidence_threshold,
        )
    loop = (OverlapLoop if overlaps else SteadyLoop)(
        scheduler,
        InputBuilder(mode, N, forced, loaded[0].draft_lens, context.tree),
        cast("AsyncExecutable", loaded[0].executable),
        Proposer(drafter, spec_plan if N else None, target.vocab_size, RowStates() if reads else None),
        target.vocab_size,
        collector,
    )
    scheduler.wants_draft_kv = loop.proposer.wants_draft_kv
    loop.proposer.learner = drafter if isinstance(drafter, LearningDrafter) else None
    if spec_plan is not None and spec_plan.sa_threshold is not None:
        loop.proposer.lookups = RepeatLookups(spec_plan.sa_threshold)
    if spec_plan is not None and spec_plan.chooses_draft_len:
        progress("measuring steps")
        measured = _step_costs(context, loaded[0], drafter, num_blocks, forced)
        loop.proposer.chooser = DraftLength(ObservedCosts(measured.cells), N)
    return EngineCore(
        loop,
        target,
        tokenizer,
        context.max_seq_len,
        config.max_input_len,
        config.seed or 0,
        use_generation_config=config.generation_config == "auto",
        executables=[one.executable for one in loaded],
        debug=config.debug,
        limits=LogitLimits(
            config.backend,
            constraints=loaded[0].takes_constraints,
            logprobs=spec_plan is None or not spec_plan.disable_logprobs,
            most_biases=context.backend.most_biases,
            most_bans=context.backend.most_bans,
        ),
    )


def _step_costs(
    context: BuildContext, target: LoadedModel, drafter: Drafter | None, num_blocks: int, forced: int
) -> StepCosts:
    """Times of the engine's steps. drafter: that of the mode, if it has one."""
    model = drafter if context.mode.has_draft_model() else None
    looks_up = model is None and not context.mode.use_one_engine()
    return step_costs(
        target.executable.inner,
        model,
        InputBuilder(context.mode, context.max_draft_len, forced, target.draft_lens),
        (0,) if looks_up else tuple(sorted(scheduled_draft_lens(context.speculation))),
        context.config.max_batch_size,
        num_blocks,
        context.config.block_size,
        context.max_seq_len,
        None if context.built is None else context.built.path,
    )


def hidden_state_collector(context: BuildContext) -> HiddenStateCollector | None:
    """Collector for SAVE_HIDDEN_STATES, None in other modes. It claims its output folder here.

    ConfigError if the folder cannot be used.
    """
    if not context.mode.is_save_hidden_states():
        return None
    speculation, target = context.speculation, context.target
    options = cast("HiddenStatesOptions", speculation.options)
    dtype = str(context.dtype).removeprefix("torch.")
    facts = ShardMetadata(speculation.capture_layers, target.hidden_size, dtype)
    folder = Path(options.output_directory)
    return HiddenStateCollector(ShardWriter(folder, options.file_prefix, options.write_interval, facts))


def prefix_reuse(allocator: BlockAllocator, mode: SpeculativeDecodingMode, provisional: int = 0) -> PrefixReuse:
    """PrefixReuse that shares what the mode allows."""
    return PrefixReuse(
        allocator,
        keeps_draft_kv=mode.use_one_engine() or mode.has_draft_model(),
        shifted=mode.draft_kv_is_shifted(),
        provisional=provisional,
    )


def build_drafter(context: BuildContext, model: LoadedModel | None) -> Drafter | None:
    """Drafter of the mode; None if nothing drafts outside the target's launch.

    model: the draft model that the drafter runs, if it runs one.
    """
    row = method_of(context.mode)
    if row is None or context.mode not in row.drafters:
        return None
    draft = None if model is None else DraftModel(model.executable, model.chain, model.draft_lens)
    build = cast("BuildDrafter", row.drafters[context.mode].open().of)
    return build(context.speculation, draft, context.config.max_num_tokens)
