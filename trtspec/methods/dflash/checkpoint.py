"""The config.json of a DFlash draft, in either of its two layouts.

The layout of z-lab, which vLLM reads the same way, is a Qwen3 config with these fields added:

    block_size                        rows of a block in training: the next token and block_size - 1 masks
    num_target_layers                 number of layers of the target it was trained for
    dflash_config.target_layer_ids    layers whose outputs the draft reads: L = after layer L, as everywhere in trtspec
    dflash_config.mask_token_id       token id of the mask rows

Newer files have block_size within dflash_config. The other layout is that of the package `speculators`
(models/dflash/config.py). config.checkpoint.speculators first makes the config of its layer the outer one. Then, next
to block_size, this layout has

    mask_token_id                     the same
    aux_hidden_state_layer_ids        layers whose outputs the draft reads, as vLLM counts: L = the input of layer L
    sample_from_anchor                whether the row of the next token guesses, too; such a draft is not supported
    draft_vocab_size                  number of drafted ids, in either layout; if fewer than the target's, d2t is needed
"""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.config.checkpoint.folder import CheckpointConfig, architecture_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.reader import Reader
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import UnsupportedError
from trtspec.methods.capture import named_layers
from trtspec.methods.mask_token import mask_token_id

DFLASH = "dflash"
DFLASH_ARCHITECTURE = "DFlashDraftModel"

# Switches of dflash_config, each with the only value that is supported.
_FIXED = {"causal": False, "use_swa": False, "attention_sink_bias": False, "use_aux_hidden_state": True}


@dataclass(frozen=True)
class DFlashConfig:
    """The fields of config.json that are specific to a DFlash draft.

    target_layer_ids: "after layer i". num_target_layers, mask_token_id: None if the file does not say. of_speculators:
    whether the file has the layout of the package `speculators`.
    """

    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int | None
    block_size: int
    draft_vocab_size: int
    of_speculators: bool

    @classmethod
    def of(cls, config: ModelConfig) -> DFlashConfig:
        """Return the fields of a draft's config.

        Raises UnsupportedError for drafts of another kind, CheckpointError for fields that make no sense.
        """
        where = f"draft model {config.path}: "
        if config.architecture != DFLASH_ARCHITECTURE:
            raise UnsupportedError(
                f"{where}architecture {config.architecture!r} is no DFlash draft we run; supported: "
                f"{DFLASH_ARCHITECTURE}"
            )
        if any(window is not None for window in config.windows):
            raise UnsupportedError(
                f"{where}layers with a sliding window, which DFlash makes causal, are not built; use a draft of "
                "full_attention layers"
            )
        read = Reader(dict(config.raw), config.path / "config.json", "draft")
        own = read.sub("dflash_config", read.object("dflash_config") or {})
        for name, value in _FIXED.items():
            if own.get(name) not in (None, value):
                raise own.unsupported(name, f"only {value!r} is built")
        for name, only in (
            ("is_causal", False),
            ("sample_from_anchor", False),
            ("target_hidden_size", config.hidden_size),
        ):
            if read.get(name) not in (None, only):
                raise read.unsupported(name, f"only {only!r} is built; use another draft")
        block = own if own.get("block_size") is not None else read
        size = block.positive_int("block_size")
        if size < 2:
            raise block.error("block_size", f"= {size} has no room for a mask; correct it in the file")
        mask = own.integer("mask_token_id") if own.get("mask_token_id") is not None else mask_token_id(config)
        drafted = read.optional_positive_int("draft_vocab_size") or config.vocab_size
        if drafted > config.vocab_size:
            raise read.error(
                "draft_vocab_size", f"= {drafted} is more than the {config.vocab_size} ids of the target; correct it"
            )
        of_speculators = read.get("speculators_model_type") is not None
        return cls(
            target_layer_ids=named_layers(
                *((read, "aux_hidden_state_layer_ids", 1) if of_speculators else (own, "target_layer_ids", 0))
            ),
            num_target_layers=read.optional_positive_int("num_target_layers"),
            mask_token_id=mask,
            block_size=size,
            draft_vocab_size=drafted,
            of_speculators=of_speculators,
        )


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether the checkpoint's config says that it is a DFlash draft."""
    return architecture_of(checkpoint) == DFLASH_ARCHITECTURE


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return what planning needs to know of the draft. Raises the errors of DFlashConfig.of."""
    model = ModelConfig.of(checkpoint, "draft")
    head_config = DFlashConfig.of(model)
    return DraftInfo(
        method=DFLASH,
        vocab_size=model.vocab_size,
        max_model_len=model.max_seq_len,
        n_predict=head_config.block_size - 1,
        capture_layers=head_config.target_layer_ids,
        mask_token_id=head_config.mask_token_id,
        checkpoint=model,
    )
