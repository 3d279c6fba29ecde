"""The table of methods: one row each, which names the method's parts from the checkpoint reader to the trainer.

A new method is a folder here, a row, and a member of modes.SpeculativeDecodingMode for each way it runs. Rows are data.
They name parts by Refs, so that nothing is imported before it is used. Planning opens the Refs of parts that read
configurations, build/ those of parts that run, and train/ the trainer's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtspec.modes import SpeculativeDecodingMode


@dataclass(frozen=True)
class Ref:
    """A reference "package.module:Name", imported when it is opened."""

    path: str

    def open(self) -> Any:
        """Import and return the object.

        Where there is none, Python's own error is raised: ImportError, AttributeError or ValueError.
        """
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


def _room(path: str) -> Ref:
    return Ref(f"trtspec.methods.{path}")


_LAST_STATE, _CHOSEN_LAYERS = _room("capture:last_state"), _room("capture:chosen_layers")
_WORKER, _HEAD_DRAFTER = _room("worker:SpecWorker"), _room("head_drafter:HeadDrafter")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table. A Ref that is None means that the method has no such part.

    name: what users call the method. needs: what a target needs for the method, in a few words.

    Checkpoint: `checkpoint` is a function (CheckpointConfig, SpeculativeConfig) -> DraftInfo, which raises for
    checkpoints that it cannot run. `recognises` is a function (CheckpointConfig) -> bool. Draft checkpoints are tested
    against the rows in the order of the table. Rows that are of_target are tested only where the folder's name contains
    no row's `folder_hints`; a hint selects its row. Target checkpoints are tested too: one that a row without of_target
    recognises is refused as a target. of_target: the method's layers come with the target's checkpoint, unless another
    one is named. bare: the checkpoint is not described like a decoder.

    Settings: `options` is a methods.options.MethodOptions class, whose fields are those of SpeculativeConfig that only
    this method takes. `takes` lists further fields. `check`: (SpeculativeConfig, TargetInfo, DraftInfo | None), raises
    ConfigError for contradictions. `substitute`: (SpeculativeConfig, max_batch_size) -> the SpeculativeConfig of
    another method, which runs instead. `capture`: (SpeculativeConfig, TargetInfo, DraftInfo | None) -> the target's
    layers that the method reads, as "after layer i". one_rank: the method runs on one rank, even if the target runs on
    several.

    Number of drafts K: implied_draft_len is K where the user sets none: a number or the name of a field. most_drafts is
    set where K may not exceed the checkpoint's n_predict, and says what n_predict counts. auto_draft_len is K where the
    engine chooses how many drafts a step has, None = it cannot.

    Parts: `head` is a HeadWeights class. `workers` and `drafters` name the class that drafts in each mode. `trainer` is
    a HeadOptions class, and `trains` says what it makes.
    """

    name: str
    needs: str
    checkpoint: Ref | None = None
    recognises: Ref | None = None
    folder_hints: tuple[str, ...] = ()
    of_target: bool = False
    bare: bool = False
    options: Ref | None = None
    takes: tuple[str, ...] = ()
    check: Ref | None = None
    substitute: Ref | None = None
    capture: Ref | None = None
    one_rank: bool = False
    implied_draft_len: int | str | None = None
    auto_draft_len: int | None = None
    most_drafts: str | None = None
    head: Ref | None = None
    workers: Mapping[SpeculativeDecodingMode, Ref] = field(default_factory=dict)
    drafters: Mapping[SpeculativeDecodingMode, Ref] = field(default_factory=dict)
    trainer: Ref | None = None
    trains: str | None = None


_M = SpeculativeDecodingMode
_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max", "prompt_lookup_latest")
_WITH_MODELS = ("quantization", "draft_confidence_threshold", "sa_config")
"""Fields that all methods with draft layers or a draft model take."""
_TRAINED = "trained for this target"

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            name="eagle",
            needs=f"an EAGLE head {_TRAINED}",
            checkpoint=_room("eagle.checkpoint:read"),
            recognises=_room("eagle.checkpoint:recognises"),
            folder_hints=("eagle-",),
            takes=_WITH_MODELS,
            capture=_LAST_STATE,
            auto_draft_len=5,
            head=_room("eagle.weights:EagleWeights"),
            workers={_M.EAGLE_ONE_MODEL: _WORKER},
            drafters={_M.EAGLE: _HEAD_DRAFTER},
            trainer=_room("eagle.train:EagleOptions"),
            trains="a head of the original EAGLE",
        ),
        Method(
            name="eagle3",
            needs=f"an EAGLE3 (or, for parallel_drafting, P-EAGLE) head {_TRAINED}",
            checkpoint=_room("eagle3.checkpoint:read"),
            recognises=_room("eagle3.checkpoint:recognises"),
            folder_hints=("eagle3",),
            takes=("capture_layers", *_WITH_MODELS),
            check=_room("eagle3.checkpoint:check_target"),
            capture=_CHOSEN_LAYERS,
            auto_draft_len=5,
            head=_room("eagle3.weights:Eagle3Weights"),
            workers={_M.EAGLE3_ONE_MODEL: _WORKER, _M.P_EAGLE: _room("parallel.worker:PEagleWorker")},
            drafters={_M.EAGLE3: _HEAD_DRAFTER},
            trainer=_room("eagle3.train:Eagle3Options"),
            trains="an EAGLE3 head",
        ),
        Method(
            name="medusa",
            needs=f"Medusa heads {_TRAINED}",
            checkpoint=_room("medusa.checkpoint:read"),
            recognises=_room("medusa.checkpoint:recognises"),
            bare=True,
            takes=_WITH_MODELS,
            capture=_LAST_STATE,
            most_drafts="heads of the draft checkpoint, each of which drafts one token",
            auto_draft_len=5,
            head=_room("medusa.weights:MedusaWeights"),
            workers={_M.MEDUSA: _WORKER},
            trainer=_room("medusa.train:MedusaOptions"),
            trains="Medusa heads",
        ),
        Method(
            name="mlp_speculator",
            needs=f"an MLP speculator {_TRAINED}",
            checkpoint=_room("mlp_speculator.checkpoint:read"),
            recognises=_room("mlp_speculator.checkpoint:recognises"),
            bare=True,
            takes=_WITH_MODELS,
            capture=_LAST_STATE,
            one_rank=True,
            most_drafts="heads of the draft checkpoint, each of which drafts one token",
            auto_draft_len=5,
            head=_room("mlp_speculator.weights:MLPSpeculatorWeights"),
            workers={_M.MLP_SPECULATOR: _WORKER},
            trainer=_room("mlp_speculator.train:MLPSpeculatorOptions"),
            trains="an MLP speculator",
        ),
        Method(
            name="dflash",
            needs=f"a DFlash draft {_TRAINED}",
            checkpoint=_room("dflash.checkpoint:read"),
            recognises=_room("dflash.checkpoint:recognises"),
            takes=("capture_layers", *_WITH_MODELS),
            capture=_CHOSEN_LAYERS,
            most_drafts="masks of a block (block_size - 1) that the draft was trained on",
            auto_draft_len=5,
            head=_room("dflash.weights:DFlashWeights"),
            workers={_M.DFLASH: _room("dflash.worker:DFlashWorker")},
        ),
        Method(
            name="dspark",
            needs=f"a DSpark draft {_TRAINED}",
            checkpoint=_room("dspark.checkpoint:read"),
            recognises=_room("dspark.checkpoint:recognises"),
            takes=("capture_layers", *_WITH_MODELS),
            check=_room("dspark.checkpoint:check"),
            capture=_CHOSEN_LAYERS,
            most_drafts="drafts of a block that the draft was trained on",
            auto_draft_len=5,
            head=_room("dspark.weights:DSparkWeights"),
            workers={_M.DSPARK: _room("dspark.worker:DSparkWorker")},
            trainer=_room("dspark.train:DSparkTraining"),
            trains="a DSpark draft",
        ),
        Method(
            name="mtp",
            needs="MTP layers in the target's own checkpoint, or in one that was made for this target",
            checkpoint=_room("mtp.checkpoint:read"),
            recognises=_room("mtp.checkpoint:recognises"),
            of_target=True,
            takes=("vanilla", *_WITH_MODELS),
            check=_room("mtp.checkpoint:check"),
            capture=_room("mtp.checkpoint:capture_layers"),
            auto_draft_len=5,
            head=_room("mtp.weights:MtpWeights"),
            workers={
                _M.MTP: _room("mtp.worker:MtpWorker"),
                _M.MTP_EAGLE_ONE_MODEL: _room("mtp.chain_worker:MtpChainWorker"),
            },
            drafters={_M.MTP_EAGLE: _HEAD_DRAFTER},
            trainer=_room("mtp.train:MtpOptions"),
            trains="MTP modules (a whole checkpoint with them, in MiMo's layout)",
        ),
        Method(
            name="ngram",
            needs="nothing",
            options=_room("ngram.options:NGramOptions"),
            auto_draft_len=5,
            drafters={_M.NGRAM: _room("ngram.drafter:NGramDrafter")},
        ),
        Method(
            name="suffix",
            needs="nothing",
            options=_room("suffix.options:SuffixOptions"),
            implied_draft_len="suffix_decoding_max_tree_depth",
            auto_draft_len=8,
            drafters={_M.SUFFIX: _room("suffix.drafter:SuffixDrafter")},
        ),
        Method(
            name="grammar",
            needs="structured_outputs: only text that a grammar forces is drafted",
            implied_draft_len=8,
            auto_draft_len=8,
        ),
        Method(
            name="auto",
            needs="nothing: n-gram lookup with lengths chosen by batch size",
            takes=_LOOKUP,
            substitute=_room("ngram.options:suggest"),
        ),
        Method(
            name="extract_hidden_states",
            needs="nothing: it writes the target's hidden states to files, and drafts nothing",
            options=_room("hidden_states.options:HiddenStatesOptions"),
            takes=("capture_layers",),
            capture=_CHOSEN_LAYERS,
            implied_draft_len=1,
        ),
        Method(
            name="custom_class",
            needs="your own drafter",
            options=_room("custom.options:CustomOptions"),
            takes=_LOOKUP,
            drafters={_M.USER_PROVIDED: _room("custom.drafter:CustomDrafter")},
        ),
        # The last row, because any decoder may be a draft model.
        Method(
            name="draft_model",
            needs="a draft checkpoint of the same vocabulary, or of another; one with a pard_token takes "
            "parallel_drafting (PARD)",
            checkpoint=_room("draft_model.checkpoint:read"),
            takes=("use_heterogeneous_vocab", *_WITH_MODELS),
            check=_room("draft_model.checkpoint:check"),
            auto_draft_len=5,
            head=_room("draft_model.head:DecoderWeights"),
            workers={
                _M.DRAFT_TARGET_ONE_MODEL: _room("draft_model.worker:DraftModelWorker"),
                _M.PARD: _room("parallel.worker:PardWorker"),
            },
            drafters={_M.DRAFT_TARGET: _room("draft_model.drafter:ChainDrafter")},
        ),
    )
}


def method_of(mode: SpeculativeDecodingMode) -> Method | None:
    """Return the row of a mode's method; None for NONE."""
    return METHODS.get(mode.traits.method)
