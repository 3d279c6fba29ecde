"""Build the draft head of a folder without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtspec.config.checkpoint.folder import read_checkpoint
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.dflash.weights import DFlashWeights
from trtspec.methods.draft_model.head import DecoderWeights
from trtspec.methods.dspark.checkpoint import as_decoder
from trtspec.methods.dspark.weights import DSparkWeights
from trtspec.methods.eagle.weights import EagleWeights
from trtspec.methods.eagle3.weights import Eagle3Weights
from trtspec.methods.head_weights import HeadSource, build_head
from trtspec.methods.medusa.weights import MedusaWeights
from trtspec.methods.mlp_speculator.weights import MLPSpeculatorWeights
from trtspec.methods.mtp.weights import MtpWeights
from trtspec.models.decoder import Decoder

# Method -> class that reads its checkpoints, and function that reads their config.json.
ROOMS: dict[str, tuple[Any, Any]] = {
    "dflash": (DFlashWeights, ModelConfig.from_folder),
    "draft_model": (DecoderWeights, ModelConfig.from_folder),
    "dspark": (DSparkWeights, lambda folder, role: as_decoder(read_checkpoint(folder, role))),
    "eagle": (EagleWeights, ModelConfig.from_folder),
    "eagle3": (Eagle3Weights, ModelConfig.from_folder),
    "medusa": (MedusaWeights, read_checkpoint),
    "mlp_speculator": (MLPSpeculatorWeights, read_checkpoint),
    "mtp": (MtpWeights, ModelConfig.from_folder),
}


def head_of(name: str, folder: Path, target: Decoder, owner: Path | None = None, **fields: Any) -> Any:
    """Build the head in `folder` from HeadSource(**fields).

    owner: the target's folder, with which EAGLE compares its tensors. The head has values if the target has them,
    unless `reads_weights` says otherwise.
    """
    kind, read = ROOMS[name]
    fields = {"reads_weights": not target.norm.weight.is_meta, **fields}
    theirs: Any = None if owner is None else ModelConfig.from_folder(owner)
    return build_head(kind, HeadSource(checkpoint=read(folder, "draft"), owner=theirs, **fields), target)
