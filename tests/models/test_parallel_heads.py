"""Drafts of one pass over mask tokens equal those of a forward pass over [text, masks] without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.checkpoints import make_checkpoint, oracle, oracle_logits
from tests.head_checkpoints import make_dflash, make_eagle3
from tests.models.built_heads import head_of
from tests.models.head_session import Watching, assert_close, states, told
from tests.models.paper_heads import VOCAB, K, PaperHead, session_of, turned
from tests.models.test_eagle3_head import SOME_IDS, PaperEagle3
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.methods.dflash.worker import DFlashWorker
from trtspec.methods.draft_model.head import DecoderHead
from trtspec.methods.head import DraftHead
from trtspec.methods.parallel.worker import PardWorker, PEagleWorker
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder

MASK = 77

Expected = Callable[[list[int]], Tensor]
"""A function: tokens of a request, including the one just drawn -> logits [K, Vd] of its drafts."""


class WatchedPard(Watching, PardWorker):
    """A PARD worker that keeps the outputs of its pass."""


class WatchedPEagle(Watching, PEagleWorker):
    """A P-EAGLE worker that keeps the outputs of its pass."""


def assert_drafts_are_those_of(
    target: Path,
    load: Callable[[Decoder], DraftHead],
    kind: Callable[..., Watching],
    capture: Sequence[int],
    expected_of: Callable[[transformers.PreTrainedModel], Expected],
    target_ids: Sequence[int] = range(VOCAB),
) -> None:
    """Launch prompts, then drafts of which none, some and all are accepted, and compare each step's drafts.

    Neither rejected rows nor masks may leave a trace.
    """
    theirs, generator = oracle(target), torch.Generator().manual_seed(1)
    expected = expected_of(theirs)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (90, 7)]
    session = session_of(target, load, capture, prompts, partial(kind, mask_token_id=MASK))
    for accepted in (None, 2, 0, 4, 1):  # None: the prompts
        outputs = session.launch(
            [[] if accepted is None else told(theirs, known, accepted, K) for known in session.known]
        )
        assert outputs.proposal is not None
        assert outputs.verdict is not None
        assert outputs.verdict.num_tokens.tolist() == [1 if accepted is None else accepted + 1] * 2
        (scores,) = session.worker.scores  # of the only pass
        for b, known in enumerate(session.known):
            logits = expected(known)
            assert_close(scores.view(2, K, -1)[b], logits)
            assert outputs.proposal.draft_tokens[b].tolist() == [target_ids[i] for i in logits.argmax(-1).tolist()]


# -- PARD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "llama31", "mistral_swa", "qwen2", "qwen3"])
def test_pard_reads_the_text_and_masks(tmp_path: Path, arch: str) -> None:
    """PARD's drafts equal those of transformers' model of the draft; the target is of another kind and depth."""
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=2, initializer_range=0.06, name="target")
    draft = make_checkpoint(tmp_path, arch, initializer_range=0.06, name="draft", seed=5)
    model = oracle(draft)

    def load(decoder: Decoder) -> DraftHead:
        config = ModelConfig.from_folder(draft, "draft")
        return DecoderHead(load_decoder(config, torch.float32, "draft"), decoder.spec.num_layers)

    def expected(known: list[int]) -> Tensor:
        return oracle_logits(model, [*known, *[MASK] * (K - 1)])[-K:]

    assert_drafts_are_those_of(target, load, WatchedPard, (), lambda theirs: expected)


# -- P-EAGLE -------------------------------------------------------------------------------------------------------


class PaperPEagle(PaperEagle3):
    """P-EAGLE: EAGLE3's layer, then plain layers, which make K drafts at once."""

    def at_once(self, captured: Tensor, following: list[int]) -> Tensor:
        """Draft at once: captured [n, ...] and the token after each position -> logits [K, Vd]."""
        masks = K - 1
        fused = self.fuse(torch.cat((captured, self.w["mask_hidden"].reshape(1, -1).expand(masks, -1))))
        x = self.forward(self.embedding[[*following, *[MASK] * masks]], fused)
        for i in range(1, self.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            x = x + self.attention(self.norm(x, f"{layer}input_layernorm"), layer)
            x = x + self.mlp(self.norm(x, f"{layer}post_attention_layernorm"), layer)
        return self.logits(x[-K:])


P_EAGLE: dict[str, dict[str, Any]] = {
    "one layer": {"num_layers": 1},
    "four layers": {"num_layers": 4, "own_embedding": True},
    "reduced vocabulary": {"num_layers": 2, "target_ids": SOME_IDS, "own_embedding": True},
    "norm before residual": {"num_layers": 2, "norm_before_residual": True},
    "biases": {"num_layers": 2, "attention_bias": True},
    "shared lm_head": {"num_layers": 2, "own_head": False},
    "norm before fc": {"num_layers": 2, "norm_before_fc": True},
    "layout of speculators": {"num_layers": 2, "speculators": True, "fc_norm": True, "own_embedding": True},
    "vLLM's name": {"num_layers": 2, "architectures": ["PeagleLlamaForCausalLM"]},
}


@pytest.mark.parametrize("name", P_EAGLE)
def test_p_eagle_reads_states_and_masks(tmp_path: Path, name: str) -> None:
    capture, fields = (0, 1, 3), P_EAGLE[name]
    target = make_checkpoint(tmp_path, "llama", num_hidden_layers=4, initializer_range=0.06, name="target")
    head = make_eagle3(tmp_path, target, None, mask=MASK, **fields)

    def expected_of(theirs: transformers.PreTrainedModel) -> Expected:
        paper = PaperPEagle(head, theirs)
        return lambda known: paper.at_once(states(theirs, known[:-1], capture)[0], known[1:])

    assert_drafts_are_those_of(
        target,
        lambda decoder: head_of("eagle3", head, decoder, num_captured=3, parallel=True),
        WatchedPEagle,
        capture,
        expected_of,
        fields.get("target_ids", range(VOCAB)),
    )


# -- DFlash --------------------------------------------------------------------------------------------------------


class WatchedDFlash(Watching, DFlashWorker):
    """A DFlash worker that keeps the outputs of its pass."""


class PaperDFlash(PaperHead):
    """z-lab's DFlash: a block whose rows see each other and the text's keys and values.

    The text's keys and values are made of the target's states.
    """

    def fuse(self, captured: Tensor) -> Tensor:
        return self.norm(self.linear(captured, "fc"), "hidden_norm")

    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        """Run the layers: e [K+1, H] of the block, h [n, H] of the text -> y [K+1, H]."""
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}."
            e = e + self.all_to_all(self.norm(e, f"{layer}input_layernorm"), h, f"{layer}self_attn.")
            e = e + self.mlp(self.norm(e, f"{layer}post_attention_layernorm"), layer)
        return e

    def logits(self, y: Tensor) -> Tensor:
        return self.norm(y, "norm") @ self.lm_head.T

    def all_to_all(self, x: Tensor, text: Tensor, prefix: str) -> Tensor:
        def heads(rows: Tensor, name: str) -> Tensor:
            return self.linear(rows, f"{prefix}{name}_proj").unflatten(-1, (-1, self.config["head_dim"]))

        both = torch.cat((text, x))
        q, k = self.norm(heads(x, "q"), f"{prefix}q_norm"), self.norm(heads(both, "k"), f"{prefix}k_norm")
        cos, sin = (table[0][:, None] for table in self.rotary(x, torch.arange(len(both))[None]))
        q = q * cos[len(text) :] + turned(q) * sin[len(text) :]
        k = k * cos + turned(k) * sin
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), heads(both, "v").repeat_interleave(groups, dim=1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{prefix}o_proj")

    def at_once(self, captured: Tensor, token: int) -> Tensor:
        """Draft at once: captured [n, ...] of the text before the token -> logits [K, V]."""
        return self.logits(self.forward(self.embedding[[token, *[MASK] * K]], self.fuse(captured))[1:])


DFLASH: dict[str, dict[str, Any]] = {
    "two layers": {},
    "four layers, one state": {"num_layers": 4, "capture": (2,)},
    "biases": {"attention_bias": True},
    "states in another order": {"capture": (3, 0)},
    "as many KV heads": {"num_key_value_heads": 4},
    "block_size in dflash_config": {
        "block_size": None,
        "dflash_config": {"target_layer_ids": [0, 1, 3], "mask_token_id": MASK, "block_size": 8},
    },
}


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_blocks_see_the_text_and_themselves(tmp_path: Path, name: str) -> None:
    fields = {"capture": (0, 1, 3), **DFLASH[name]}
    target = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=4, initializer_range=0.06, name="target")
    draft = make_dflash(tmp_path, target, mask=MASK, **fields)
    capture = fields["capture"]

    def expected_of(theirs: transformers.PreTrainedModel) -> Expected:
        paper = PaperDFlash(draft, theirs)
        return lambda known: paper.at_once(states(theirs, known[:-1], capture)[0], known[-1])

    assert_drafts_are_those_of(
        target,
        lambda decoder: head_of("dflash", draft, decoder, num_captured=len(capture)),
        WatchedDFlash,
        capture,
        expected_of,
    )
