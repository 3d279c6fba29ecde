"""What config.json of a DFlash draft says: a Qwen3 config, and what z-lab's files (vLLM reads the same) add to it.

    block_size                        rows of a block it was trained on: the next token and block_size - 1 masks
    num_target_layers                 of the target it was trained for
    dflash_config.target_layer_ids    whose outputs it reads: L = after layer L, as everywhere in trtspec
    dflash_config.mask_token_id       what the rows of masks read

Newer files have block_size within dflash_config.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.config.checkpoint.folder import CheckpointConfig, architecture_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.checkpoint.reader import Reader, short
from trtspec.config.resolved import DraftInfo
from trtspec.config.speculative import SpeculativeConfig
from trtspec.errors import UnsupportedError
from trtspec.methods.mask_token import mask_token_id

DFLASH = "dflash"
DFLASH_ARCHITECTURE = "DFlashDraftModel"

# dflash_config switches whose other value is a draft we do not run
_FIXED = {"causal": False, "use_swa": False, "attention_sink_bias": False, "use_aux_hidden_state": True}


@dataclass(frozen=True)
class DFlashFacts:
    """target_layer_ids: "after layer i". num_target_layers, mask_token_id: None where the file does not say."""

    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int | None
    block_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> DFlashFacts:
        """Raises UnsupportedError for drafts of another kind, CheckpointError for fields that make no sense."""
        where = f"draft model {config.path}: "
        if config.architecture != DFLASH_ARCHITECTURE:
            raise UnsupportedError(
                f"{where}architecture {config.architecture!r} is no DFlash draft we run; supported: "
                f"{DFLASH_ARCHITECTURE}"
            )
        if config.quantization is not None:
            raise UnsupportedError(
                f"{where}DFlash drafts of quantised weights ({config.quantization}) are not supported; use the bf16, "
                "fp16 or fp32 one, and quantization in speculative_config"
            )
        if any(window is not None for window in config.windows):
            raise UnsupportedError(f"{where}layers with a sliding window, which DFlash makes causal, are not built")
        read = Reader(dict(config.raw), config.path / "config.json", "draft")
        own = read.sub("dflash_config", read.object("dflash_config") or {})
        for name, value in _FIXED.items():
            if own.get(name) not in (None, value):
                raise own.unsupported(name, f"only {value!r} is built")
        for name, only in (("is_causal", False), ("draft_vocab_size", config.vocab_size)):
            if read.get(name) not in (None, only):
                raise read.unsupported(name, f"only {only!r} is built")
        block = own if own.get("block_size") is not None else read
        size = block.positive_int("block_size")
        if size < 2:
            raise block.error("block_size", f"= {size} has no room for a mask; correct it in the file")
        mask = own.integer("mask_token_id") if own.get("mask_token_id") is not None else mask_token_id(config)
        return cls(_layer_ids(own), read.optional_positive_int("num_target_layers"), mask, size)


def _layer_ids(read: Reader) -> tuple[int, ...]:
    ids = read.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise read.error("target_layer_ids", f"= {short(ids)} is not a list of layer numbers >= 0; correct config.json")
    return tuple(ids)


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether it says that it is a DFlash draft."""
    return architecture_of(checkpoint) == DFLASH_ARCHITECTURE


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """What resolution needs to know of it. Raises as DFlashFacts.of does."""
    model = ModelConfig.of(checkpoint, "draft")
    facts = DFlashFacts.of(model)
    return DraftInfo(
        method=DFLASH,
        vocab_size=model.vocab_size,
        max_model_len=model.max_seq_len,
        n_predict=facts.block_size - 1,
        capture_layers=facts.target_layer_ids,
        mask_token_id=facts.mask_token_id,
        checkpoint=model,
    )
