"""Load the models of a BuildContext: checkpoints as modules, engine folders as graphs, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from trtspec.backends.compiled import CompiledStep
from trtspec.backends.cuda.chain_graph import ChainOnCuda
from trtspec.backends.cuda.device import WorkQueue
from trtspec.backends.cuda.executable import CudaExecutable, LaunchLimits, ModuleOnCuda, module_graphs
from trtspec.backends.eager import EagerExecutable
from trtspec.backends.export import graph_draft_lens
from trtspec.backends.sizes import Sizes
from trtspec.build.context import BuildContext
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.steps import build_step
from trtspec.engine.stats import TimedAsyncExecutable, TimedChain, TimedExecutable
from trtspec.kv.pool import allocate_layers, allocate_on, kv_nbytes
from trtspec.methods.drafter import ChainExecutable
from trtspec.methods.step import Step
from trtspec.models.attention import as_ops
from trtspec.models.weights import DTYPES

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model on its backend.

    draft_lens: K of its graphs, ascending; empty = any. takes_constraints: its launches take LogitConstraints and
    return logits. step: the module, if the model runs as one. chain: all passes of a draft model as one launch, if its
    backend can do that.
    """

    executable: TimedExecutable
    draft_lens: tuple[int, ...] = ()
    takes_constraints: bool = True
    step: Step | None = None
    chain: ChainExecutable | None = None


@dataclass(frozen=True)
class ModelLoader:
    """A loader of the models of an engine.

    num_blocks: number of KV blocks of the cache. gpu: queue of the GPU that runs the steps, None = the CPU runs them.
    """

    num_blocks: int
    gpu: WorkQueue | None
    report: Progress

    def load(self, context: BuildContext, target: LoadedModel | None = None) -> LoadedModel:
        """Load the model of context.role. target: for a draft, the engine's target."""
        if context.built is not None:
            return self._compiled(context, context.built)
        return self._module(context, build_step(context, None if target is None else target.step))

    def _module(self, context: BuildContext, step: Step) -> LoadedModel:
        config, layers, dtype = context.config, step.kv_layers, step.like.dtype
        as_ops(step)
        if self.gpu is None:
            kv = allocate_layers(layers, self.num_blocks, config.block_size, dtype)
            timed = TimedExecutable(EagerExecutable(step, kv), step.weight_bytes_per_step, kv_nbytes(kv))
            return LoadedModel(timed, step=step)
        step.to(self.gpu.device)
        kv = allocate_on(self.gpu.device, layers, self.num_blocks, config.block_size, dtype)
        is_target = context.role == "target"
        compiled = module_graphs(step, _module_draft_lens(context, step), context.cuda_graphs, is_target)
        return self._captured(context, ModuleOnCuda(step, compiled, kv, self.gpu, self._limits(context)), step)

    def _compiled(self, context: BuildContext, built: EngineFolder) -> LoadedModel:
        compiled = CompiledStep.from_dict(built.data["executables"][context.role])
        kind, folder = context.backend.load_executable(), built.path / context.role
        kind.check(compiled)
        block_size, dtype = context.config.block_size, DTYPES[compiled.dtype]
        if self.gpu is not None:
            there = allocate_on(self.gpu.device, compiled.kv, self.num_blocks, block_size, dtype)
            graphed = cast("type[CudaExecutable]", kind)
            return self._captured(context, graphed(compiled, folder, there, self.gpu, self._limits(context)))
        kv = kind.allocate_kv(compiled, self.num_blocks, block_size, dtype)
        timed = TimedExecutable(kind(compiled, folder, kv), compiled.weight_bytes, kv_nbytes(kv))
        return LoadedModel(timed, _draft_lens(compiled), compiled.takes_constraints)

    def _captured(self, context: BuildContext, executable: CudaExecutable, step: Step | None = None) -> LoadedModel:
        """Capture the model's CUDA graphs, and return the model.

        Graphs of a draft model are of whole chains, as single passes are seldom asked for.
        """
        compiled, role = executable.compiled, context.role

        def report(done: int, total: int) -> None:
            self.report(f"capturing CUDA graphs of the {role}: {done} of {total}")

        timed = TimedAsyncExecutable(executable, compiled.weight_bytes, kv_nbytes(executable.kv))
        timed_chain = None
        if role == "draft" and context.cuda_graphs and not compiled.makes_drafts:
            assert self.gpu is not None
            chain = ChainOnCuda(executable, self.gpu, self._limits(context), context.max_draft_len)
            chain.capture(report)
            timed_chain = TimedChain(chain, timed)
        else:
            executable.capture(report)
        takes_constraints = step is not None or compiled.takes_constraints
        return LoadedModel(timed, _draft_lens(compiled), takes_constraints, step, timed_chain)

    def _limits(self, context: BuildContext) -> LaunchLimits:
        sizes = Sizes.of(context.config, context.max_seq_len, context.max_total_draft_tokens, self.num_blocks)
        return LaunchLimits(sizes.batch_size, sizes.columns)


def _draft_lens(compiled: CompiledStep) -> tuple[int, ...]:
    """K of the graphs, if their launches verify or make drafts."""
    return compiled.draft_lens if compiled.verifies_drafts or compiled.makes_drafts else ()


def _module_draft_lens(context: BuildContext, step: Step) -> Sequence[int]:
    """Each K that a launch of the step may be asked for."""
    own = graph_draft_lens(step, context.spec_plan)
    return own if own != (0,) or context.role == "draft" else range(context.max_draft_len + 1)
