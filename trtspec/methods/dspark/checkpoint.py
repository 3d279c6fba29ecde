"""The config.json of a DSpark draft, in either of its two layouts.

The layout of DeepSpec (deepseek-ai/DeepSpec, deepspec/modeling/dspark/qwen3/config.py) is a Qwen3 config with fields
added. That of the package `speculators` (speculators/models/dspark/config.py) has the Qwen3 config in
`transformer_layer_config`. The fields:

    block_size                          rows of a block in training
    mask_token_id                       token id of the mask rows
    target_layer_ids                    DeepSpec: layers whose outputs the draft reads, L = after layer L, as everywhere
                                        in trtspec
    aux_hidden_state_layer_ids          speculators: the same as vLLM counts, L = the input of layer L
    num_target_layers                   DeepSpec: number of layers of the target it was trained for
    sample_from_anchor                  whether the row of the next token guesses, too. DeepSpec's always does;
                                        if a file of speculators does not say, it does not, as in vLLM
    draft_vocab_size                    speculators: number of drafted ids; if fewer than the target's, d2t is needed
    markov_rank, markov_head_type       width of the head that reads the draft before (0 = none); vanilla, gated or rnn
    enable_confidence_head              whether a head guesses how likely each draft is accepted
    confidence_head_with_markov         whether that head reads the draft before, too
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trtspec.config.checkpoint.folder import CheckpointConfig, architecture_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.reader import Reader
from trtspec.config.speculation_plan import DraftInfo, TargetInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.capture import named_layers
from trtspec.methods.mask_token import mask_token_id

DSPARK = "dspark"
MARKOV_HEADS = ("vanilla", "gated", "rnn")

_DEEPSPEC = "Qwen3DSparkModel"
_ARCHITECTURES = (_DEEPSPEC, "Gemma4DSparkModel", "DSparkDraftModel")  # not all are supported
_NESTED = "transformer_layer_config"
_LAYER_IDS = {True: ("aux_hidden_state_layer_ids", 1), False: ("target_layer_ids", 0)}  # key: nested or not


@dataclass(frozen=True)
class DSparkConfig:
    """The fields of config.json that are specific to a DSpark draft.

    target_layer_ids: "after layer i". num_target_layers, mask_token_id: None if the file does not say. from_anchor:
    True = all rows of a block guess the token after them; False = all but the first guess their own. markov: kind of
    the Markov head, "" if there is none.
    """

    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int | None
    block_size: int
    from_anchor: bool
    draft_vocab_size: int
    markov_rank: int
    markov: str
    confidence: bool
    confidence_reads_markov: bool

    @classmethod
    def of(cls, config: ModelConfig) -> DSparkConfig:
        """Return the fields of a config that `as_decoder` returned.

        Raises UnsupportedError for drafts of another kind, CheckpointError for fields that make no sense.
        """
        read = Reader(dict(config.raw), config.path / "config.json", "draft")
        _refuse_others(read, config)
        nested = read.get(_NESTED) is not None
        from_anchor = read.boolean("sample_from_anchor", not nested)
        size = read.positive_int("block_size")
        if size < 2 and not from_anchor:
            raise read.error("block_size", f"= {size} has no room for a mask; correct it in the file")
        drafted = read.optional_positive_int("draft_vocab_size") or config.vocab_size
        if drafted > config.vocab_size:
            raise read.error(
                "draft_vocab_size", f"= {drafted} is more than the {config.vocab_size} ids of the target; correct it"
            )
        rank = read.integer("markov_rank", 256 if nested else None)
        if rank < 0:
            raise read.error("markov_rank", f"= {rank} is no width; correct it in the file, 0 = no Markov head")
        kind = read.string("markov_head_type", "vanilla")
        if rank and kind not in MARKOV_HEADS:
            raise read.unsupported("markov_head_type", f"this head is not built; supported: {', '.join(MARKOV_HEADS)}")
        confidence = read.boolean("enable_confidence_head", nested)
        with_markov = read.boolean("confidence_head_with_markov", rank > 0)
        if confidence and with_markov and not rank:
            raise read.error("confidence_head_with_markov", "= true without a Markov head (markov_rank 0); correct it")
        return cls(
            target_layer_ids=named_layers(read, *_LAYER_IDS[nested]),
            num_target_layers=read.optional_positive_int("num_target_layers"),
            mask_token_id=mask_token_id(config),
            block_size=size,
            from_anchor=from_anchor,
            draft_vocab_size=drafted,
            markov_rank=rank,
            markov=kind if rank else "",
            confidence=confidence,
            confidence_reads_markov=confidence and with_markov,
        )

    @property
    def most_drafts(self) -> int:
        """Number of drafts of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1


def _refuse_others(read: Reader, config: ModelConfig) -> None:
    where = f"draft model {config.path}: "
    if read.get(_NESTED) is None and config.architecture != _DEEPSPEC:
        raise UnsupportedError(
            f"{where}architecture {config.architecture!r} is no DSpark draft we run; supported: {_DEEPSPEC}, and any "
            f"of the speculators package, with a {_NESTED}"
        )
    if config.model_type != "qwen3":
        raise UnsupportedError(f"{where}layers of model_type {config.model_type!r} are not built; supported: qwen3")
    if any(window is not None for window in config.windows):
        raise UnsupportedError(
            f"{where}layers with a sliding window, which DSpark makes causal, are not built; use a draft of "
            "full_attention layers"
        )
    for name in read.data:
        if name.startswith("dspark_"):
            raise read.unsupported(
                name, "this is of a draft within DeepSeek-V4, which is not built; use another method"
            )
    for name, only in (("is_neox_style", True), ("logit_scale", 1), ("target_hidden_size", config.hidden_size)):
        if read.get(name) not in (None, only):
            raise read.unsupported(name, f"only {only!r} is built; use another draft")


def as_decoder(checkpoint: CheckpointConfig) -> ModelConfig:
    """Return the config of either layout as a decoder's. Raises the errors of ModelConfig.of."""
    read = Reader(dict(checkpoint.raw), checkpoint.path / "config.json", "draft")
    layers = read.object(_NESTED)
    if layers is None:
        return ModelConfig.of(checkpoint, "draft")
    # Of fields in both configs the inner one counts, except for those that describe the draft as a whole.
    flat: dict[str, Any] = {**read.data, **layers, "quantization_config": read.get("quantization_config")}
    flat |= {name: read.get(name) for name in ("architectures", "tie_word_embeddings", "dtype") if name in read.data}
    kind = read.sub(_NESTED, layers).string("model_type")
    return ModelConfig.of(dataclasses.replace(checkpoint, raw=flat, model_type=kind), "draft")


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether the checkpoint's config says that it is a DSpark draft."""
    return checkpoint.raw.get("speculators_model_type") == DSPARK or architecture_of(checkpoint) in _ARCHITECTURES


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return what planning needs to know of the draft. Raises the errors of DSparkConfig.of."""
    model = as_decoder(checkpoint)
    head_config = DSparkConfig.of(model)
    return DraftInfo(
        method=DSPARK,
        vocab_size=model.vocab_size,
        max_model_len=model.max_seq_len,
        n_predict=head_config.most_drafts,
        capture_layers=head_config.target_layer_ids,
        mask_token_id=head_config.mask_token_id,
        checkpoint=model,
    )


def check(config: SpeculativeConfig, target: TargetInfo, draft: DraftInfo | None) -> None:
    """Raise ConfigError for a confidence threshold if the draft has no confidence head."""
    threshold = config.draft_confidence_threshold
    if threshold is None or draft is None or not isinstance(draft.checkpoint, ModelConfig):
        return
    if not DSparkConfig.of(draft.checkpoint).confidence:
        raise ConfigError(
            f"draft_confidence_threshold={threshold}: the draft model={config.model!r} has no confidence head; leave "
            "it unset, or use a draft with enable_confidence_head"
        )
