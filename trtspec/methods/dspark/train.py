"""Training of DSpark drafts (see methods.dspark.head): Cheng et al., arXiv 2607.05147, equations 9 to 12.

Blocks begin at anchors P of a window and read the target's states before P. Draft k is given the text's own token
before it. Its distribution q_k is taught 0.1 of cross-entropy with the text's next token, and 0.9 of |q_k - p_k|
summed, p_k being the target's. The confidence is taught 1 - |q_k - p_k| / 2, the probability of acceptance.
Later drafts count less, by exp(-(k - 1) / 4). With rank 0 and no confidence head it is a DFlash draft, but that rows
guess from the anchor on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError
from trtspec.methods.dspark.checkpoint import MARKOV_HEADS
from trtspec.methods.dspark.head import DSparkHead, DSparkSpec
from trtspec.methods.dspark.weights import DSparkWeights
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.models.weights import DTYPES, tensors_of
from trtspec.train.data import Tokens
from trtspec.train.head import CapturingOptions, attached, initialise_head, layer_config, one_layer, setting, write_head
from trtspec.train.language_model import compiled, heads_first
from trtspec.train.unrolled import LessonLoss

DECAY = 4.0
"""Drafts until a draft counts 1 / e of the first."""


@dataclass(frozen=True, kw_only=True)
class DSparkTraining(CapturingOptions):
    """num_layers: of the block. rank, markov: of the head that reads the draft before, 0 = none. mask_token_id: None =
    the last id of the vocabulary. anchors: blocks in a window. unroll is the block's size."""

    method: ClassVar[str] = "dspark"

    simulated: ClassVar[bool] = False

    num_layers: int = setting(1, "decoder layers of the draft")
    rank: int = setting(64, "width of the head that reads the draft before; 0: none")
    markov: str = setting("vanilla", f"kind of that head: {', '.join(MARKOV_HEADS)}")
    confidence: bool = setting(True, "no head that guesses how likely each draft is accepted")
    mask_token_id: int | None = setting(None, "id that rows of masks read (default: the vocabulary's last)")
    anchors: int = setting(16, "blocks in a window")
    unroll: int = setting(4, "drafts of a block")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("num_layers", "anchors")
        if self.markov not in MARKOV_HEADS:
            raise ConfigError(f"markov={self.markov!r}; use one of {', '.join(MARKOV_HEADS)}")
        if self.rank < 0:
            raise ConfigError(f"rank={self.rank} is no width; use a positive one, or 0 for no Markov head")
        if self.seq_len <= self.unroll + self.anchors:
            raise ConfigError(
                f"anchors={self.anchors}: seq_len={self.seq_len} has no room for so many blocks of {self.unroll}; use "
                "fewer, or longer windows"
            )

    def check_target(self, config: ModelConfig) -> None:
        """See HeadOptions."""
        if not 0 <= self.mask(config.vocab_size) < config.vocab_size:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id} is not in the target's vocabulary; use an id in "
                f"[0, {config.vocab_size - 1}], or leave it unset for the last one"
            )

    @torch.no_grad()
    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> DSparkHead:
        """See HeadOptions. It says all ids; its last norm begins as the target's."""
        layers = replace(one_layer(target.spec, qk_norm=True), num_layers=self.num_layers)
        spec = DSparkSpec(
            decoder=replace(layers, windows=(None,) * self.num_layers),
            num_captured=len(capture),
            draft_vocab_size=target.spec.vocab_size,
            from_anchor=True,
            rank=self.rank,
            markov=self.markov if self.rank else "",
            confidence=self.confidence,
            confidence_reads_markov=self.confidence and self.rank > 0,
            own_head=False,
        )
        head = DSparkHead(spec)
        initialise_head(head)
        head.norm.weight.copy_(target.norm.weight.float())
        if self.rank:
            cast(Tensor, head.markov["embedding"].weight).normal_(0.0, 0.01)  # so that nothing is biased at first
        return attached(head, target)

    def mask(self, vocab_size: int) -> int:
        """What rows of masks read."""
        return vocab_size - 1 if self.mask_token_id is None else self.mask_token_id

    def loss(self, head: DraftHead, target: Decoder, capture: tuple[int, ...]) -> LessonLoss:
        """See HeadOptions."""
        assert isinstance(head, DSparkHead)
        return BlockLoss(
            Blocks(head, self.unroll, self.mask(target.spec.vocab_size)),
            target,
            self.anchors,
            DTYPES[self.dtype],
            self.compile,
        )

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """See HeadOptions; in bf16, in the layout of the package speculators."""
        assert isinstance(head, DSparkHead)
        layers = layer_config(head.spec.decoder, config, torch.bfloat16)
        facts = {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": self.method,
            "aux_hidden_state_layer_ids": [i + 1 for i in capture],  # there, an id is the layer entered
            "block_size": self.unroll,
            "mask_token_id": self.mask(config.vocab_size),
            "draft_vocab_size": config.vocab_size,
            "sample_from_anchor": True,
            "markov_rank": self.rank,
            "markov_head_type": self.markov,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": head.spec.confidence_reads_markov,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "transformer_layer_config": {**layers, "model_type": "qwen3", "num_hidden_layers": self.num_layers},
        }
        write_head(self.out, tensors_of(head, DSparkWeights.slots(head.spec)), facts, torch.bfloat16)


class BlockAttend:
    """Attention of a layer's two calls: the window's keys and values, then blocks of `width` rows at anchors [B, A],
    which see the window before their anchor, and themselves."""

    def __init__(self, anchors: Tensor, width: int) -> None:
        self.anchors, self.width = anchors, width
        self.text: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        batch, groups = self.anchors.shape[0], q.shape[1] // k.shape[1]
        k, v = (heads_first(x.repeat_interleave(groups, dim=1), batch) for x in (k, v))
        if layer not in self.text:
            self.text[layer] = (k, v)
            return q
        keys, values = (torch.cat(pair, dim=2) for pair in zip(self.text[layer], (k, v), strict=True))
        mask = self._seen(keys.shape[2] - k.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(heads_first(q, batch), keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).reshape(q.shape)

    def _seen(self, seq: int, rows: int) -> Tensor:
        """[B, 1, A * width, seq + A * width] bool."""
        device = self.anchors.device
        starts = self.anchors.repeat_interleave(self.width, dim=1)[..., None]  # [B, A * width, 1]
        before = torch.arange(seq, device=device) < starts
        block = torch.arange(rows, device=device) // self.width
        own = (block[:, None] == block).expand(starts.shape[0], -1, -1)
        return torch.cat((before, own), dim=-1)[:, None]


class Blocks(nn.Module):
    """A draft as it is trained: blocks of `width` rows, which all guess."""

    def __init__(self, head: DSparkHead, width: int, mask_token_id: int) -> None:
        super().__init__()
        self.head, self.width, self.mask_token_id = head, width, mask_token_id

    def forward(
        self, inputs: Tensor, following: Tensor, captured: Tensor, probs: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """inputs, following [B, S], captured [B * S, n * Ht], probs [B, S, V] of what follows each row, anchors [B, A]
        -> loss, agreement [width]: how often drafts 1..k all hit the target's arg-max."""
        head, width = self.head, self.width
        B, S = inputs.shape
        attend = BlockAttend(anchors, width)
        c = head.fuse(captured)
        head.read_in(c, torch.arange(S, device=inputs.device).repeat(B), attend)
        at = (anchors[..., None] + torch.arange(width, device=inputs.device)).flatten(1)  # [B, A * width]
        before = inputs.gather(1, at)
        is_anchor = torch.arange(at.shape[1], device=inputs.device) % width == 0
        ids = torch.where(is_anchor, before, self.mask_token_id)
        h = head(ids.flatten(), c, at.flatten(), attend)
        e = head.before(before.flatten(), h)
        logits = self._biased(h, e)  # [B * A, width, V]
        log_q = logits.log_softmax(-1)
        p = probs.gather(1, at[..., None].expand(-1, -1, probs.shape[-1])).view_as(log_q)
        each = -0.1 * log_q.gather(-1, following.gather(1, at).view(-1, width, 1))[..., 0]
        gap = (log_q.exp() - p).abs().sum(-1)  # [B * A, width], at most 2
        each = each + 0.9 * gap
        if head.spec.confidence:
            likely = (1 - gap / 2).detach().clamp(0, 1)
            each = each + F.binary_cross_entropy(head.confidences(h, e).float().view_as(gap), likely, reduction="none")
        weights = torch.exp(-torch.arange(width, device=inputs.device) / DECAY)
        right = (logits.argmax(-1) == p.argmax(-1)).int().cumprod(1).float().mean(0)
        return (each.mean(0) * weights).sum() / weights.sum(), right.detach()

    def _biased(self, h: Tensor, e: Tensor) -> Tensor:
        head = self.head
        blocks = h.shape[0] // self.width
        base, h, e = (x.view(blocks, self.width, x.shape[-1]) for x in (head.logits(h), h, e))
        state, found = torch.zeros_like(e[:, 0]), []
        for k in range(self.width):
            logits, state = head.biased(base[:, k], h[:, k], e[:, k], state)
            found.append(logits)
        return torch.stack(found, dim=1)


class BlockLoss:
    """The loss of one lesson, at `number` anchors a window. They are spread evenly, and the window says where they
    begin, so that a run that goes on learns the same. After a call `agreement` [width] is that of Blocks."""

    def __init__(self, blocks: Blocks, target: Decoder, number: int, dtype: torch.dtype, compile: bool = True) -> None:
        self.agreement = torch.zeros(blocks.width)

        def loss(inputs: Tensor, following: Tensor, captured: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
            # what follows the last row may be unknown (see shards), so no block reaches it
            stride = (inputs.shape[1] - 1 - blocks.width) // number
            with torch.no_grad():
                first = 1 + inputs.sum(1, keepdim=True) % stride
                anchors = first + stride * torch.arange(number, device=inputs.device)
                probs = target.logits(last.flatten(0, 1)).softmax(-1).view(*following.shape, -1)
            weights = {name: parameter.to(dtype) for name, parameter in blocks.named_parameters()}
            arguments = (inputs, following, captured.flatten(0, 1).to(dtype), probs, anchors)
            return cast("tuple[Tensor, Tensor]", torch.func.functional_call(blocks, weights, arguments))

        self._loss = compiled(loss) if compile else loss

    def __call__(self, inputs: Tensor, following: Tensor, captured: Tensor, last: Tensor) -> Tensor:
        loss, self.agreement = self._loss(inputs, following, captured, last)
        return loss

    def metrics(self) -> dict[str, float]:
        """Acceptance length along the last lesson's text, each draft given that text's token before it."""
        return {"acceptance_length": 1.0 + float(self.agreement.sum())}
