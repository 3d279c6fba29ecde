"""Build an engine folder: compile the graphs of every executable, pack the weights, record what was built."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError

from trtspec.backends.aoti.cut import blocks_of
from trtspec.backends.cuda.executable import launch_graphs
from trtspec.backends.export import graph_draft_lens
from trtspec.backends.sizes import Sizes
from trtspec.backends.table import BACKENDS, COMPILERS, USUAL_COMPILER, Backend
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.context import BuildContext, Role, plan_context
from trtspec.build.engine_folder import EngineFolder, engine_json, file_facts
from trtspec.build.kv_plan import full_kv_blocks, wanted_kv_blocks
from trtspec.build.steps import build_step
from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.quantized import CheckpointQuantization
from trtspec.config.engine import EngineConfig
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.step import Step
from trtspec.models.specs import dense_spec
from trtspec.ops import load_plugins

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_TOKENIZER_FOLDER = "additional_chat_templates"


def build_engine(
    checkpoint: str | Path,
    output: str | Path,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    *,
    replace_existing: bool = False,
    report: Callable[[str], None] = lambda what: None,
    options: TensorRTOptions | None = None,
) -> EngineFolder:
    """Compile `checkpoint`, and the draft that `speculative` names, into the folder `output`.

    The engine appears at `output` only when it is complete. options: only for backend tensorrt; with native attention
    block_size is set to what fits. Raises ConfigError if the folder is taken, DependencyError if there is no compiler,
    and whatever `LLM` would raise for this model and config.
    """
    output = Path(output).resolve()
    refuse_taken(output, replace_existing)
    backend = engine_backend(config, options)
    options = engine_options(backend, options)
    compile_step = backend.load_compiler()
    stored = _storable(speculative)
    load_plugins()
    context = plan_context(checkpoint, speculative, config, backend)
    if stored is not None and stored.get("method") is None:  # the folder's name may tell the method, the copy's not
        stored["method"] = context.speculation.method
    if options is not None and options.native:
        context = with_linear_cache(context)
    config = context.config
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        staging = Path(scratch) / "engine"
        executables: dict[str, Any] = {}
        for role, step in described_steps(context, report).items():
            folder = staging / role
            folder.mkdir(parents=True)
            own: dict[str, Any] = {}
            if backend.profiles:
                own = {"sizes": largest_sizes(context, role, options), "options": options}
            if backend.constraints:
                own["constraints"] = role == "target"
            compiled = compile_step(
                step,
                config.block_size,
                wanted_graphs(context, role, step),
                folder,
                lambda what, role=role: report(f"{role}: {what}"),
                **own,
            )
            executables[role] = compiled.to_dict()
        _copy_checkpoint_facts(context, staging)
        report("writing config.json")
        built = replace(config, backend=backend.name, dtype=_dtype_name(context), max_seq_len=context.max_seq_len)
        data = engine_json(built, stored, context.target.raw, executables)
        data["checkpoint_quantization"] = {role: str(kind) for role, kind in checkpoint_quantizations(context).items()}
        data["files"] = file_facts(staging)
        (staging / "config.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        _publish(staging, output, replace_existing)
    engine = EngineFolder.open(output)
    assert engine is not None
    return engine


def engine_backend(config: EngineConfig, options: TensorRTOptions | None = None) -> Backend:
    """Backend that `config` names, or USUAL_COMPILER if that backend compiles nothing.

    ConfigError for options that are not of this backend.
    """
    backend = COMPILERS.get(config.backend, BACKENDS[USUAL_COMPILER])
    if options is not None and not backend.profiles:
        raise ConfigError(
            f"TensorRTOptions are given, and the engine is built by backend {backend.name}; leave them out, or set "
            "backend = 'tensorrt'"
        )
    return backend


def engine_options(backend: Backend, options: TensorRTOptions | None) -> TensorRTOptions | None:
    """Return the options of an engine of `backend`; None = the usual ones.

    ConfigError or UnsupportedError for options that are of another backend.
    """
    if not backend.plugins:
        return (options or TensorRTOptions()).without_plugins()
    if options is not None and options.sm:
        raise ConfigError(
            f"sm = {options.sm}: backend {backend.name} builds for the GPU that is here; leave it out, or set "
            "backend = 'tensorrt_rtx'"
        )
    return options


def refuse_taken(output: Path, replace_existing: bool) -> None:
    """Raise ConfigError unless `output` is free, or is an engine, in whatever state, that may be replaced."""
    if output.exists() and (os.path.ismount(output) or output.samefile(Path.cwd())):
        raise ConfigError(f"{output} cannot be replaced by a new folder; name one that is to be made inside it")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not EngineFolder.has_mark(output):
        raise ConfigError(f"{output} exists and is no engine; choose another output folder")
    if not replace_existing:
        raise ConfigError(f"{output} holds an engine; choose another output folder, or replace it with --replace")


def described_steps(context: BuildContext, report: Callable[[str], None]) -> dict[Role, Step]:
    """Steps of all models by role, to be compiled or described.

    UnsupportedError for a dtype that the backend does not compute in.
    """
    for role in context.roles:
        context.backend.check_dtype(context.of(role).dtype)
    made: dict[Role, Step] = {}
    for role in context.roles:
        one = context.of(role)
        report(f"{'loading' if context.reads_weights else 'describing'} {one.model.path}")
        made[role] = build_step(one, made.get("target"))
    return made


def wanted_graphs(context: BuildContext, role: Role, step: Step) -> list[tuple[int, bool]]:
    """(K, whether the graph is uniform) of each graph that the backend is to compile of a model's step."""
    backend, draft_lens = context.backend, {*graph_draft_lens(step, context.spec_plan)}
    if backend.torch_gpu:  # generations have graphs of their own, whether drafts are made inside or not
        context_lens = {context.max_draft_len} if role == "target" and draft_lens == {0} else set()
        return launch_graphs(step, sorted(draft_lens | context_lens))
    # a decoder that is cut has the same layer graphs either way, and the rest of a uniform graph saves little
    ragged_alone = not step.verifies_drafts or backend.profiles or (backend.cuts and blocks_of(step))
    kinds = (False,) if ragged_alone else (False, True)
    return [*itertools.product(sorted(draft_lens), kinds)]


def with_linear_cache(context: BuildContext) -> BuildContext:
    """The same context with the cache that TensorRT's own attention needs: each KV block holds a whole sequence.

    There is one block for each request that can run. UnsupportedError for steps and models that this attention cannot
    run. ConfigError if the cache's size was asked for.
    """
    config, mode, K = context.config, context.mode, context.max_draft_len
    way, remedy = ("attention = 'native'", "attention = 'plugin'")
    if not context.backend.plugins:
        way, remedy = (f"backend {context.backend.name}", "another backend")
    has_layers = mode.reads_hidden_states() or (mode.use_one_engine() and not mode.drafts_without_kv())
    if has_layers and K > 1:
        raise UnsupportedError(
            f"{way}: {mode.name} with {K} drafts writes the draft layers' cache {K} times in a launch, and TensorRT's "
            f"own attention writes a cache once; use {remedy}, or 1 draft"
        )
    models = [dense_spec(model) for model in (context.target, context.draft) if isinstance(model, ModelConfig)]
    if any(window is not None for spec in models for window in spec.windows):
        raise UnsupportedError(f"{way} is built without sliding windows; use {remedy}")
    if config.num_kv_blocks is not None or config.kv_cache_memory is not None:
        raise ConfigError(
            f"{way} has a cache of max_batch_size whole sequences; leave num_kv_blocks and kv_cache_memory unset"
        )
    tokens = -(-(context.max_seq_len + 2 * K) // 8) * 8
    linear = replace(config, block_size=tokens, num_kv_blocks=config.max_batch_size + 1)
    return replace(context, config=linear)


def largest_sizes(context: BuildContext, role: str, options: TensorRTOptions | None) -> Sizes:
    """Sizes of the largest launch. A draft with launches of its own draws one token for each request."""
    draft_len = context.max_total_draft_tokens if role == "target" else 0
    blocks = wanted_kv_blocks(context) or full_kv_blocks(context)
    linear = options is not None and options.native
    return replace(Sizes.of(context.config, context.max_seq_len, draft_len, blocks), linear=linear)


def checkpoint_quantizations(context: BuildContext) -> dict[str, CheckpointQuantization]:
    """Quantisations that the checkpoints have already, by role."""
    models = {"target": context.target, "draft": context.draft}
    return {role: model.quantization for role, model in models.items() if model and model.quantization}


def _publish(staging: Path, output: Path, replace_existing: bool) -> None:
    """Move the finished folder to `output`.

    An engine that is there is moved away first, and removed only when the new one is in place.
    """
    try:
        refuse_taken(output, replace_existing)  # the last check was minutes ago
        replaced = staging.with_name("replaced")
        if output.exists():
            os.rename(output, replaced)
        try:
            os.rename(staging, output)
        except OSError:
            if replaced.exists():
                os.rename(replaced, output)
            raise
    except (ConfigError, OSError) as error:
        spare = Path(tempfile.mkdtemp(dir=output.parent, prefix=f"{output.name}-"))
        os.rename(staging, spare)
        raise ConfigError(f"{output} could not be written ({error}); the engine is in {spare}") from error


def _storable(speculative: SpeculativeConfig | None) -> dict[str, Any] | None:
    """The speculation as config.json holds it. ConfigError for what JSON cannot hold."""
    if speculative is None:
        return None
    try:
        return speculative.model_dump(mode="json", exclude_unset=True)
    except PydanticSerializationError as error:
        raise ConfigError(
            "an engine cannot hold a drafter object; build it without speculation, and give the drafter to "
            f"LLM(engine, speculative_config) ({error})"
        ) from error


def _dtype_name(context: BuildContext) -> str:
    return str(context.of("target").dtype).removeprefix("torch.")


def _copy_checkpoint_facts(context: BuildContext, staging: Path) -> None:
    """Copy the tokenizer and configs, which an engine needs in addition to graphs and weights."""
    for name in _TOKENIZER_FILES:
        if (context.target.path / name).is_file():
            shutil.copyfile(context.target.path / name, staging / name)
    if (context.target.path / _TOKENIZER_FOLDER).is_dir():
        shutil.copytree(context.target.path / _TOKENIZER_FOLDER, staging / _TOKENIZER_FOLDER)
    models: list[tuple[str, CheckpointConfig | None]] = [("target", context.target), ("draft", context.draft)]
    for role, model in models:
        if model is not None:
            (staging / role).mkdir(exist_ok=True)
            for name in ("config.json", "generation_config.json", "hf_quant_config.json"):
                if (model.path / name).is_file():
                    shutil.copyfile(model.path / name, staging / role / name)
