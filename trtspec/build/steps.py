"""Build the step of a BuildContext's model: what one launch computes, with weights or with shapes alone."""

from __future__ import annotations

from typing import cast

from torch import nn

from trtspec.build.context import BuildContext, Role
from trtspec.errors import UnsupportedError
from trtspec.methods.draft_model.translated import TranslatedStep
from trtspec.methods.head import DraftHead
from trtspec.methods.head_weights import HeadSource, build_head
from trtspec.methods.step import CaptureStep, DecodeStep, HeadStep, OneEngineStep, Step
from trtspec.methods.worker import SpecWorker
from trtspec.models.decoder import Decoder
from trtspec.models.pack_weights import pack_decoder
from trtspec.models.weights import describe_decoder, load_decoder


def build_step(context: BuildContext, target: Step | None = None) -> Step:
    """Build the step of context.role.

    target: the target's step, whose embedding and lm_head a head may share. It is built if it is needed and not given.
    """
    if context.role == "target":
        return _target_step(context)
    if context.mode.reads_hidden_states() or context.tree is not None:
        return _head_step(context, target or _target_step(context.of("target")))
    decoder = _decoder(context)
    if context.vocabulary is not None:
        return _packed(context, TranslatedStep(decoder, context.vocabulary, context.backend.functional), decoder)
    return _packed(context, DecodeStep(decoder, context.backend.functional), decoder)


def build_steps(context: BuildContext) -> dict[Role, Step]:
    """The steps of all models of the engine, by role."""
    target = build_step(context.of("target"))
    return {role: target if role == "target" else build_step(context.of(role), target) for role in context.roles}


def _target_step(context: BuildContext) -> Step:
    """Step of the target, with the mode's worker in its graph if the mode has one."""
    decoder, mode, functional = _decoder(context), context.mode, context.backend.functional
    if mode.is_save_hidden_states():
        return _packed(context, CaptureStep(decoder, (*context.speculation.capture_layers, -1), functional))
    if mode.reads_hidden_states():
        return _packed(context, CaptureStep(decoder, context.speculation.capture_layers, functional, context.tree))
    if not mode.use_one_engine():
        return _packed(context, DecodeStep(decoder, functional, context.tree))
    kind = cast("type[SpecWorker]", context.method.workers[mode].open())
    worker = kind.of(_head(context, decoder), context.speculation)
    return _packed(context, OneEngineStep(decoder, worker, functional), worker)


def _head_step(context: BuildContext, target: Step) -> Step:
    """Step of the mode's head, or of its draft model, as a model of its own that makes all drafts in one launch."""
    decoder = cast("DecodeStep", target).decoder
    worker = SpecWorker.of(_head(context, decoder), context.speculation)
    width = len(context.speculation.capture_layers) * decoder.spec.hidden_size
    return _packed(context, HeadStep(worker, width, decoder.norm.weight, context.backend.functional), worker, decoder)


def _head(context: BuildContext, target: Decoder) -> DraftHead:
    """Head of `target`, built as the method's row says. In a launch of its own its KV layers come first."""
    mode, speculation = context.mode, context.speculation
    assert context.method.head is not None
    source = HeadSource(
        checkpoint=context.draft or context.target,
        owner=context.target,
        num_stages=1 if mode.has_draft_model() else speculation.num_speculative_tokens,
        num_captured=len(speculation.capture_layers),
        parallel=mode.drafts_in_parallel(),
        max_seq_len=context.max_seq_len,
        first_layer=0 if mode.has_draft_model() else None,
        reads_weights=context.reads_weights,
    )
    return build_head(context.method.head.open(), source, target)


def _decoder(context: BuildContext) -> Decoder:
    make = load_decoder if context.reads_weights else describe_decoder
    return make(context.model, context.dtype, context.role, context.max_seq_len)


def _packed(
    context: BuildContext, step: Step, draft: nn.Module | None = None, excluded: nn.Module | None = None
) -> Step:
    """Return the step with its weights in the layouts of the kernels.

    draft: a module whose weights are quantised as the speculation asks. excluded: a module whose weights stay
    untouched.
    """
    target_kind, draft_kind = context.quantizations
    backend = context.backend
    if context.packs or context.quantizations != (None, None):
        try:
            head = context.config.lm_head_quantization
            pack_decoder(step, target_kind, draft, draft_kind, not backend.torch_gpu, excluded, head)
        except ValueError as error:
            kinds = f"quantization = {target_kind!r}, of the draft {draft_kind!r}, lm_head_quantization = {head!r}"
            raise UnsupportedError(f"{kinds}: {error}") from error
    return step
