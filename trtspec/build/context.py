"""Context of a build: models, speculation and backend are settled, and nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from typing_extensions import Self

from trtspec.backends.table import Backend
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.speculation import map_draft_vocabulary, plan_for_target, read_target
from trtspec.config.checkpoint.folder import CheckpointConfig
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.config.speculation_plan import SpeculationPlan
from trtspec.config.speculative import SpeculativeConfig
from trtspec.config.tree import Tree
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.table import Method, method_of
from trtspec.models.weights import DTYPES
from trtspec.modes import SpeculativeDecodingMode
from trtspec.text.vocabulary import VocabularyMap

Role = Literal["target", "draft"]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """One model of an engine that is to be built or loaded, and all that it depends on.

    role: which model of the engine it is. draft: a ModelConfig if it is described like a decoder. packs: weights are
    kept in the CPU kernels' layout. reads_weights: False = shapes alone, on torch's meta device. vocabulary: map for a
    draft whose vocabulary is not the target's. built: source of graphs and weights, None = checkpoints.
    """

    config: EngineConfig
    backend: Backend
    target: ModelConfig
    draft: CheckpointConfig | None
    spec_plan: SpeculationPlan | None
    max_seq_len: int  # tokens
    packs: bool
    role: Role = "target"
    reads_weights: bool = True
    vocabulary: VocabularyMap | None = None
    built: EngineFolder | None = None

    def of(self, role: Role) -> Self:
        """Context of the same engine's model with that role."""
        return replace(self, role=role)

    def described(self) -> Self:
        """The same context without weights."""
        return replace(self, reads_weights=False)

    @property
    def speculation(self) -> SpeculationPlan:
        assert self.spec_plan is not None
        return self.spec_plan

    @property
    def mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.NONE if self.spec_plan is None else self.spec_plan.mode

    @property
    def method(self) -> Method:
        """The row of the mode's method."""
        row = method_of(self.mode)
        assert row is not None
        return row

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the models that run as launches of their own, the target first."""
        return ("target", "draft") if self.mode.has_draft_model() else ("target",)

    @property
    def max_draft_len(self) -> int:
        """Largest K that a step verifies."""
        return (
            0 if self.spec_plan is None or self.mode.is_save_hidden_states() else self.spec_plan.num_speculative_tokens
        )

    @property
    def max_total_draft_tokens(self) -> int:
        """Largest number of drafts that a step verifies of a request: K, or N of a tree."""
        return 0 if self.max_draft_len == 0 or self.spec_plan is None else self.spec_plan.max_total_draft_tokens

    @property
    def shapes_graphs(self) -> bool:
        """Whether what is compiled differs from plain decoding."""
        return self.spec_plan is not None and self.spec_plan.shapes_graphs

    @property
    def tree(self) -> Tree | None:
        """The tree of a step's drafts; None = a chain, or no drafts."""
        return None if self.spec_plan is None else self.spec_plan.tree

    @property
    def provisional_rows(self) -> int:
        """Number of KV rows at the end of a sequence that may still change.

        Each MTP module reads one token further on than the module before it (kv/reuse.py).
        """
        return self.max_draft_len - 1 if self.mode.is_mtp_vanilla() else 0

    @property
    def model(self) -> ModelConfig:
        """Config of this role's decoder. For draft layers that read the target's states it is the target's."""
        own = self.role == "target" or self.mode.reads_hidden_states()
        return self.target if own else cast("ModelConfig", self.draft)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that hold the weights of this role.

        Weights of a draft in the target's launch are read together with the target's.
        """
        if self.built is not None:
            return (self.built.path / self.role,)
        target, draft = self.target.path, (self.draft or self.target).path
        if self.role == "draft":
            return (draft,)
        return tuple(dict.fromkeys((target, draft))) if self.mode.use_one_engine() else (target,)

    @property
    def dtype(self) -> torch.dtype:
        """dtype that the model computes in."""
        return DTYPES[self.model.dtype if self.config.dtype == "auto" else self.config.dtype]

    @property
    def cuda_graphs(self) -> bool:
        """Whether launches of this role are captured as CUDA graphs.

        `enforce_eager` of the speculation applies to draft layers, and to the launch that they are in.
        """
        drafts = self.role == "draft" or self.mode.use_one_engine()
        eager = drafts and self.spec_plan is not None and self.spec_plan.enforce_eager
        return self.config.enable_cuda_graph and not eager

    @property
    def quantizations(self) -> tuple[str | None, str | None]:
        """Quantisations that are asked for of target and draft."""
        return self.config.quantization, None if self.spec_plan is None else self.spec_plan.quantization


AT_LOAD = frozenset({"sa_config"})
"""Fields of speculative_config that may differ from those that an engine folder was built with."""


def plan_context(
    model: str | Path | EngineFolder,
    speculative: SpeculativeConfig | None,
    config: EngineConfig,
    backend: Backend,
    packs: bool | None = None,
) -> BuildContext:
    """Read the configs and check that they fit together; nothing is loaded yet.

    packs: None = as the backend does. An engine folder brings its own speculation, of which AT_LOAD may differ. One
    without speculation takes a drafter that needs no graph.
    """
    built = model if isinstance(model, EngineFolder) else None
    own = None if built is None else built.speculative_config()
    if built is not None and own is not None and speculative is not None:
        changed = speculative.model_fields_set
        if not changed or not changed <= AT_LOAD:
            raise ConfigError(
                f"engine {built.path} was built with its own speculation; set nothing in speculative_config but "
                f"{', '.join(sorted(AT_LOAD))}, or build another engine"
            )
        own = own.model_copy(update={name: getattr(speculative, name) for name in changed})
    asked = own or speculative
    target = read_target(built.path / "target" if built is not None else cast("str | Path", model))
    max_seq_len = config.max_seq_len or target.max_seq_len
    if max_seq_len > target.max_seq_len:
        raise ConfigError(f"max_seq_len = {max_seq_len} exceeds the checkpoint's {target.max_seq_len}; lower it")
    draft, spec_plan = plan_for_target(asked, target, max_seq_len, config)
    if built is not None and own is None and spec_plan is not None and spec_plan.shapes_graphs:
        what = spec_plan.mode.name if spec_plan.mode.shapes_graphs() else "a draft tree"
        raise ConfigError(
            f"engine {built.path} was built without speculation, and {what} needs graphs of its own; "
            "build an engine with it: trtspec build --speculative_decoding_mode"
        )
    if spec_plan is not None:
        backend.check_mode(spec_plan.mode, spec_plan.num_speculative_tokens, spec_plan.tree is not None)
    vocabulary = None
    if built is None and asked is not None and asked.use_heterogeneous_vocab:
        vocabulary = map_draft_vocabulary(target, cast("ModelConfig", draft))
    context = BuildContext(
        config=config,
        backend=backend,
        target=target,
        draft=draft,
        spec_plan=spec_plan,
        max_seq_len=max_seq_len,
        packs=backend.packs if packs is None else packs,
        vocabulary=vocabulary,
        built=built,
    )
    _check(context)
    return context


def _check(context: BuildContext) -> None:
    """Raise ConfigError for sizes and quantisations that contradict each other."""
    config, K = context.config, context.max_total_draft_tokens
    if config.lm_head_quantization is not None and not context.backend.packs:
        raise UnsupportedError(
            f"lm_head_quantization = {config.lm_head_quantization!r}: backend {context.backend.name} keeps the lm_head "
            "in the model's dtype; leave it unset, or use backend eager or aoti"
        )
    if context.spec_plan is not None and context.spec_plan.chooses_draft_len and context.backend.device == "cuda":
        raise UnsupportedError(
            "num_speculative_tokens is unset or 'auto', or enable_adaptive_verification is set, and backend "
            f"{context.backend.name} cannot choose the number of drafts yet; set a number, 3 for a start, and leave "
            "enable_adaptive_verification unset"
        )
    inside = ("target", context.target)  # holds draft layers that have no checkpoint of their own
    checkpoints = (inside, inside if context.draft is None else ("draft", context.draft))
    for (role, checkpoint), kind in zip(checkpoints, context.quantizations, strict=True):
        if checkpoint.quantization is not None:
            checkpoint.quantization.check_request(kind, role)
    if context.provisional_rows >= config.block_size:
        raise ConfigError(
            f"block_size = {config.block_size} is too small for MTP with {K} modules, as KV depends on so many tokens "
            f"further on; raise it to {K} or more, or lower num_speculative_tokens"
        )
    if config.max_num_tokens < config.max_batch_size * (K + 1):
        raise ConfigError(
            f"max_num_tokens = {config.max_num_tokens} cannot hold {K + 1} rows for each of max_batch_size = "
            f"{config.max_batch_size} requests; raise it to {config.max_batch_size * (K + 1)} or lower max_batch_size"
            f"{'' if K == 0 else f' or {_counted(context.speculation.tree)} (now {K})'}"
        )


def _counted(tree: Tree | None) -> str:
    """What sets the number of drafts that a step verifies of a request."""
    if tree is None:
        return "num_speculative_tokens"
    return "max_total_draft_tokens" if tree.is_dynamic else "the nodes of speculative_token_tree"
