"""Choose what an engine starts from.

It is a given engine folder, a checkpoint that runs op by op, or the compiled engine that the cache keeps for a
checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.backends.table import BACKENDS, USUAL_COMPILER
from trtspec.build.build import build_engine
from trtspec.build.cache import SIZE_VARIABLE, Cache, Held
from trtspec.build.cache_key import Digests, compiler, key_facts, key_of, stamps
from trtspec.build.context import BuildContext, plan_context
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.memory import table_bytes
from trtspec.build.models import Progress
from trtspec.build.steps import build_steps
from trtspec.config.engine import AUTO, EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DependencyError,
    TrtSpecError,
    UnsupportedError,
)
from trtspec.hub.kept import FOLDER_VARIABLE
from trtspec.models.layers import weight_bytes
from trtspec.ops import load_plugins

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_WORDS = ("No space left on device", "Disk quota exceeded")
_GRAPHS = 2**27  # bytes: more than graphs and the temporary files of a build take
_NO_ROOM = 2**20  # bytes: a disk with less free space is full


@dataclass(frozen=True)
class Start:
    """The inputs that an engine starts from.

    model, speculative, config: as plan_context takes them. held: the engine, if it is the cache's.
    """

    model: str | Path | EngineFolder
    speculative: SpeculativeConfig | None
    config: EngineConfig
    held: Held | None = None

    def release(self) -> None:
        """Allow the cache to evict the engine."""
        if self.held is not None:
            self.held.release()

    def damaged(self, error: BaseException) -> bool:
        """Whether the engine is the cache's and no longer what was built, as its digests show.

        error: what loading the engine raised. Damage is taken as its cause, and the cache drops the engine.
        """
        others = isinstance(error, TrtSpecError) and not isinstance(error, CheckpointError)
        if self.held is None or others or not isinstance(error, Exception):
            return False
        try:
            self.held.engine.verify()
        except (CheckpointError, OSError) as found:
            logger.warning("%s; it is compiled anew", str(found).partition(";")[0])
            Cache(self.held.engine.path.parent, 0).discard(self.held.engine.path.name)
            return True
        return False


class _OpByOp(Exception):
    """The reason why a checkpoint cannot run as a compiled engine here, and the remedy.

    error: the exception type to raise if the user asked for a compiled engine.
    """

    def __init__(self, why: str, remedy: str, error: type[TrtSpecError], level: int = logging.WARNING) -> None:
        super().__init__(f"{why}; {remedy}")
        self.error, self.level = error, level


def choose_start(
    model: str | Path | EngineFolder,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    progress: Progress,
    detail: Progress,
    check: Callable[[BuildContext], None],
) -> Start:
    """Resolve backend "auto" and, for a checkpoint that is to run compiled, get its engine, built if needed.

    progress: is called when an engine is built. detail: is called with the steps of the build. check: raises whatever
    else is wrong with a context, before anything is compiled.

    Raises what LLM documents for the model and the config. For backend "aoti" it also raises what prevents compiling:
    DependencyError, UnsupportedError, CapacityError for a full disk.
    """
    if isinstance(model, EngineFolder):
        return Start(model, speculative, replace(config, backend=model.backend) if config.backend == AUTO else config)
    row = BACKENDS.get(config.backend)
    if row is not None and row.runs_checkpoints:
        return Start(model, speculative, config)
    if config.backend not in (AUTO, USUAL_COMPILER):
        what = f"backend = {config.backend!r} runs engine folders, {model} is a checkpoint"
        raise ConfigError(f"{what}; {_build_first(model, config.backend)}")
    try:
        return _compiled(Path(model), speculative, config, progress, detail, check)
    except _OpByOp as reason:
        if config.backend != AUTO:
            raise reason.error(f"backend = {config.backend!r}, {model}: {reason}") from reason.__cause__
        logger.log(reason.level, "%s runs op by op and slower, not as a compiled engine: %s", model, reason)
        return Start(model, speculative, replace(config, backend="eager"))


def _compiled(
    model: Path,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    progress: Progress,
    detail: Progress,
    check: Callable[[BuildContext], None],
) -> Start:
    try:
        cache = Cache.of_environment()
    except OSError as error:
        raise _unusable("", error) from error
    if cache is None:
        why, remedy = f"{FOLDER_VARIABLE}=off keeps none", "unset it"
        if config.backend != AUTO:
            remedy += f", or {_build_first(model, config.backend)}"
        raise _OpByOp(why, remedy, ConfigError, logging.INFO)
    if "cpu" not in load_plugins() and config.backend == AUTO:
        raise _OpByOp("the C++ kernels do not serve", "run python -m trtspec_plugins.cpu", DependencyError)
    try:
        cache.open()
        digests = Digests(cache.folder / "index.json", progress)
        cxx = compiler(digests)
        if cxx is None:
            raise _OpByOp("there is no C++ compiler", "install g++ (apt install g++) or set CXX", DependencyError)
        context = plan_context(model, speculative, config, BACKENDS["eager"])
        _check_backend(context)
        before = stamps(context)
        facts = key_facts(context, digests, cxx)
        digests.save()
        build = _Build(context, speculative, before, progress, detail, check)
        held = cache.get(key_of(facts), {"model": str(model.absolute()), **facts}, build, progress)
    except OSError as error:
        if _is_full(error, cache.folder.parent):
            raise _full(cache.folder) from error
        raise _unusable(f" {cache.folder}", error) from error
    if context.shapes_graphs:
        assert speculative is not None
        assert context.spec_plan is not None
        words = speculative.model_copy(update={"method": context.spec_plan.method})
        held = replace(held, engine=held.engine.speculating(words))
        speculative = None
    return Start(held.engine, speculative, replace(config, backend=USUAL_COMPILER), held)


def _check_backend(context: BuildContext) -> None:
    """Refuse a mode or dtype that the compiler's backend does not run, as its row says."""
    backend = BACKENDS[USUAL_COMPILER]
    try:
        if context.spec_plan is not None:
            spec_plan = context.spec_plan
            backend.check_mode(context.mode, spec_plan.num_speculative_tokens, spec_plan.tree is not None)
        for role in context.roles:
            backend.check_dtype(context.of(role).dtype)
    except UnsupportedError as error:
        why, _, remedy = str(error).partition("; ")
        raise _OpByOp(why, remedy, UnsupportedError) from error


@dataclass(frozen=True)
class _Build:
    """A callable that builds the engine of a context.

    before: stamps of the checkpoints from before they were digested.
    """

    context: BuildContext
    speculative: SpeculativeConfig | None
    before: list[list[int]]
    progress: Progress
    detail: Progress
    check: Callable[[BuildContext], None]

    def __call__(self, output: Path) -> None:
        context = self.context
        self.check(context)
        folder = output.parents[1]
        free, needed = shutil.disk_usage(folder).free, _room(context)
        if free < needed:  # torch's writer of graphs ends the process when the disk is full
            raise _full(folder, f"has {free / 1e9:.2f} GB free, and the engine takes {needed / 1e9:.2f} GB")
        # Limits are not compiled in: the engine is built for the longest sequences, and each start sets its own limits.
        config = replace(context.config, backend=USUAL_COMPILER, max_seq_len=None, max_input_len=None)
        in_graphs = self.speculative if context.shapes_graphs else None
        mode = "plain decoding" if in_graphs is None else context.mode.name
        self.progress(f"compiling {context.target.path} for {mode} (once; kept in {folder})")
        start = time.perf_counter()
        try:
            with _compiling_in(output.parent / "compiler"):
                if in_graphs is not None and in_graphs.drafter is not None:  # graphs do not depend on it
                    in_graphs = in_graphs.model_copy(update={"drafter": "given:at start"})
                build_engine(context.target.path, output, in_graphs, config, report=self.detail)
        except DependencyError as error:
            why, _, remedy = str(error).partition("; ")
            raise _OpByOp(why, remedy, DependencyError) from error
        except TrtSpecError:
            raise
        except Exception as error:
            for disk in (folder, Path(tempfile.gettempdir())):
                if _is_full(error, disk):
                    raise _full(disk) from error
            raise
        if stamps(context) != self.before:
            raise CheckpointError(f"{context.target.path} changed while it was compiled; start again once it is whole")
        self.progress(f"compiled {context.target.path} in {time.perf_counter() - start:.0f} s")


@contextmanager
def _compiling_in(folder: Path) -> Iterator[None]:
    """Send the files of torch's compiler to a folder of this build, as long as the context is open.

    All processes of the user share the compiler's usual folder, and wait for each other's locks there. Other users can
    guess its name.
    """
    name, before = "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        from torch._inductor.utils import clear_caches  # a slow import, but compiling has done it already

        clear_caches()  # the caches name files in the folder, which is removed


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether `error` arose because the disk of `folder` is full.

    Compilers and torch's writers report a full disk in words or not at all.
    """
    seen: BaseException | None = error
    said = False
    while seen is not None and not said:
        said = getattr(seen, "errno", None) in _FULL or any(words in str(seen) for words in _FULL_WORDS)
        seen = seen.__cause__ or seen.__context__
    return said or shutil.disk_usage(folder).free < _NO_ROOM


def _room(context: BuildContext) -> int:
    """Bytes that the engine of a context and the temporary files of its build take."""
    steps = build_steps(context.described()).values()
    return _GRAPHS + sum(weight_bytes(step) + table_bytes(step) for step in steps)


def _unusable(folder: str, error: OSError) -> _OpByOp:
    why = f"the cache of engines{folder} cannot be used ({error})"
    return _OpByOp(why, f"set {FOLDER_VARIABLE} to a folder that can be written", ConfigError)


def _full(folder: Path, how: str = "is full") -> _OpByOp:
    return _OpByOp(
        f"the disk of {folder} {how}",
        f"make room, set {FOLDER_VARIABLE} to a folder with more, or {SIZE_VARIABLE} to keep less there",
        CapacityError,
    )


def _build_first(model: str | Path, backend: str) -> str:
    return f"build an engine first: trtspec build --checkpoint_dir {model} --output_dir DIR --backend {backend}"
