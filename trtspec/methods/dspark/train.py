"""Training of DSpark drafts (methods.dspark.head): Cheng et al., arXiv 2607.05147, equations 9 to 12.

Blocks begin at anchors P of a window and read the target's states before P. Draft k reads the text's own token before
it. q_k is the draft's distribution, p_k the target's. The loss of a draft is 0.1 times the cross-entropy of q_k with
the text's next token, plus 0.9 times sum |q_k - p_k|. The confidence learns 1 - sum |q_k - p_k| / 2, the probability of
acceptance. Later drafts count less, by exp(-(k - 1) / 4).

With rank 0 and no confidence head, the draft is a DFlash draft, except that its rows guess from the anchor on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from trtspec.train.cross_entropy import in_blocks, rows_of_logits
from trtspec.train.data import Tokens
from trtspec.train.head import CapturingOptions, attached, initialise_head, layer_config, one_layer, setting, write_head
from trtspec.train.language_model import heads_first
from trtspec.train.training_batches import TrainingBatch, taught_ahead, texts_of
from trtspec.train.unrolled import TrainingLoss

DECAY = 4.0
"""Number of drafts after which a draft counts 1 / e of the first."""


@dataclass(frozen=True, kw_only=True)
class DSparkTraining(CapturingOptions):
    """Options of the training of a DSpark draft.

    num_layers: decoder layers of the draft. rank, markov: width (0 = none) and kind of the head that reads the draft
    before. mask_token_id: None = the last id of the vocabulary. anchors: blocks in a window. unroll: the block's size.
    """

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
        """Raise ConfigError if the mask token is not in the target's vocabulary."""
        if not 0 <= self.mask(config.vocab_size) < config.vocab_size:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id} is not in the target's vocabulary; use an id in "
                f"[0, {config.vocab_size - 1}], or leave it unset for the last one"
            )

    @torch.no_grad()
    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> DSparkHead:
        """Return an untrained head that drafts all ids; its last norm begins as a copy of the target's."""
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
            cast(Tensor, head.markov["embedding"].weight).normal_(0.0, 0.01)  # almost no bias at first
        return attached(head, target)

    def mask(self, vocab_size: int) -> int:
        """Token id of the mask rows."""
        return vocab_size - 1 if self.mask_token_id is None else self.mask_token_id

    def loss(self, head: DraftHead, target: Decoder, capture: tuple[int, ...]) -> TrainingLoss:
        """Return the loss over blocks at the anchors of each window."""
        assert isinstance(head, DSparkHead)
        return BlockLoss(
            Blocks(head, self.unroll, self.mask(target.spec.vocab_size)),
            target,
            self.anchors,
            DTYPES[self.dtype],
        )

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the head to `out` in bf16, in the layout of the package `speculators`."""
        assert isinstance(head, DSparkHead)
        layers = layer_config(head.spec.decoder, config, torch.bfloat16)
        facts = {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": self.method,
            "aux_hidden_state_layer_ids": [i + 1 for i in capture],  # in this layout an id is the layer entered
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
    """Attention in training, which each layer calls twice: first for the window's rows, then for the rows of blocks.

    The first call stores keys and values of the window. The second attends from blocks of `width` rows at the anchors.
    A block attends to itself and to the part of its text before its anchor. anchors: [B, A]. texts: [B, S], the output
    of training_batches.texts_of.
    """

    def __init__(self, anchors: Tensor, width: int, texts: Tensor) -> None:
        self.anchors, self.width, self.texts = anchors, width, texts
        self.text: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        batch, groups = self.anchors.shape[0], q.shape[1] // k.shape[1]
        k, v = (heads_first(x.repeat_interleave(groups, dim=1), batch) for x in (k, v))
        if layer not in self.text:
            self.text[layer] = (k, v)
            return q
        keys, values = (torch.cat(pair, dim=2) for pair in zip(self.text[layer], (k, v), strict=True))
        mask = self._seen(k.shape[2])
        out = F.scaled_dot_product_attention(heads_first(q, batch), keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).reshape(q.shape)

    def _seen(self, rows: int) -> Tensor:
        """Keys that each row of the blocks attends to, [B, 1, A * width, S + A * width] bool."""
        device = self.anchors.device
        starts = self.anchors.repeat_interleave(self.width, dim=1)  # [B, A * width]
        before = torch.arange(self.texts.shape[1], device=device) < starts[..., None]
        before = before & (self.texts[:, None] == self.texts.gather(1, starts)[..., None])
        block = torch.arange(rows, device=device) // self.width
        own = (block[:, None] == block).expand(starts.shape[0], -1, -1)
        return torch.cat((before, own), dim=-1)[:, None]


class Blocks(nn.Module):
    """A module that runs a draft in training, on blocks of `width` rows that all guess."""

    def __init__(self, head: DSparkHead, width: int, mask_token_id: int) -> None:
        super().__init__()
        self.head, self.width, self.mask_token_id = head, width, mask_token_id

    def forward(self, inputs: Tensor, places: Tensor, captured: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' outputs h [B * A, width * H] of each block, and e [B * A, width * R].

        e is what the head knows of the tokens before the rows' drafts. inputs, places: [B, S]. captured:
        [B * S, n * Ht]. anchors: [B, A].
        """
        head, width = self.head, self.width
        attend = BlockAttend(anchors, width, texts_of(places))
        c = head.fuse(captured)
        head.read_in(c, places.flatten(), attend)
        at = rows_at(anchors, width)  # [B, A * width]
        before = inputs.gather(1, at)
        is_anchor = torch.arange(at.shape[1], device=inputs.device) % width == 0
        ids = torch.where(is_anchor, before, self.mask_token_id)
        h = head(ids.flatten(), c, places.gather(1, at).flatten(), attend)
        e = head.before(before.flatten(), h)
        return h.view(anchors.numel(), -1), e.view(anchors.numel(), -1)


class _Said(nn.Module):
    """A module, like Blocks, that computes the logits of blocks."""

    def __init__(self, head: DSparkHead, width: int) -> None:
        super().__init__()
        self.head, self.width = head, width

    def forward(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits [n, width, V] fp32 and the confidence head's probabilities [n, width], None without that head.

        h, e: outputs of Blocks for n blocks.
        """
        head, width, n = self.head, self.width, len(h)
        h, e = h.view(n * width, -1), e.view(n * width, -1)
        base = head.logits(h).view(n, width, -1)
        states, emb = h.view(n, width, -1), e.view(n, width, -1)
        state, found = torch.zeros_like(emb[:, 0]), []
        for k in range(width):
            logits, state = head.biased(base[:, k], states[:, k], emb[:, k], state)
            found.append(logits)
        sure = head.confidences(h, e).float().view(n, width) if head.spec.confidence else None
        return torch.stack(found, dim=1), sure


class BlockLoss:
    """The loss of one training batch at `number` anchors per window; every row of their blocks has a label.

    The anchors are evenly spaced. Their offset depends only on the window, so a resumed run learns the same. After a
    call, `agreement` [width] has for each k the rate at which drafts 1..k all equal the target's arg-max.
    """

    def __init__(self, blocks: Blocks, target: Decoder, number: int, dtype: torch.dtype) -> None:
        self.blocks, self.target, self.number, self.dtype = blocks, target, number, dtype
        self.agreement = torch.zeros(blocks.width)
        self.said = _Said(blocks.head, blocks.width)

    def begin(self, progress: float) -> None:
        """Begin a step. The loss does not depend on `progress`, the share of the run that is over."""

    def __call__(self, *training_batch: Tensor) -> Tensor:
        """Return the loss, a scalar in fp32. training_batch: the fields of a train.training_batches.TrainingBatch."""
        one, width, head = TrainingBatch(*training_batch), self.blocks.width, self.blocks.head
        anchors, usable = anchors_of(one, width, self.number)
        weights = {name: parameter.to(self.dtype) for name, parameter in head.named_parameters(prefix="head")}
        captured = one.captured.flatten(0, 1).to(self.dtype)
        outputs = torch.func.functional_call(self.blocks, weights, (one.inputs, one.places, captured, anchors))
        at = rows_at(anchors, width)
        following = one.inputs.roll(-1, dims=1).gather(1, at).view(-1, width)  # [B * A, width]
        row = torch.arange(len(at), device=at.device)[:, None]
        last = one.last[row, at].view(anchors.numel(), width, -1)
        shares = torch.exp(-torch.arange(width, device=at.device) / DECAY)
        shares = shares / shares.sum() / usable.sum().clamp(min=1)
        right = torch.zeros(anchors.numel(), width, dtype=torch.bool)

        def loss(rows: Tensor, outputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Tensor:
            logits, sure = torch.func.functional_call(self.said, dict(weights), tuple(outputs))
            with torch.no_grad():
                p = self.target.logits(last[rows].flatten(0, 1)).softmax(-1).view_as(logits)
            log_q = logits.log_softmax(-1)
            gap = (log_q.exp() - p).abs().sum(-1)  # [n, width], at most 2
            each = 0.9 * gap - 0.1 * log_q.gather(-1, following[rows][..., None])[..., 0]
            if sure is not None:
                likely = (1 - gap / 2).detach().clamp(0, 1)
                each = each + F.binary_cross_entropy(sure, likely, reduction="none")
            right[rows] = logits.detach().argmax(-1) == p.argmax(-1)
            part: Tensor = (each.sum(0) * shares).sum()
            return part

        rows = usable.flatten().nonzero()[:, 0]
        total = in_blocks(loss, rows, outputs, weights, max(rows_of_logits(len(head.target_ids)) // width, 1))
        self.agreement = right[rows].int().cumprod(1).float().mean(0).nan_to_num()
        return total

    def metrics(self) -> dict[str, float]:
        """Acceptance length along the text of the last training batch; each draft reads the text's token before it."""
        return {"acceptance_length": 1.0 + float(self.agreement.sum())}


def rows_at(anchors: Tensor, width: int) -> Tensor:
    """Rows [B, A * width] of the blocks at anchors [B, A]."""
    return (anchors[..., None] + torch.arange(width, device=anchors.device)).flatten(1)


def anchors_of(training_batch: TrainingBatch, width: int, number: int) -> tuple[Tensor, Tensor]:
    """Return anchors [B, A] of `number` blocks per window, and which of the blocks can be taught, [B, A] bool.

    A block can begin at any row but the first of a text. All rows of the block must be of one text and taught, and the
    row after them must be in the window. Anchors are spread evenly over such rows. If there are fewer than `number`,
    fewer anchors are usable.
    """
    size = training_batch.places.shape[1]
    able = (training_batch.places > 0) & (torch.arange(size, device=training_batch.places.device) < size - width)
    for k in range(width):
        able &= taught_ahead(training_batch, k)
    places = torch.argsort(~able, dim=1, stable=True)  # possible rows, ascending, before the others
    count = able.sum(1, keepdim=True)
    stride = (count // number).clamp(min=1)
    first = training_batch.inputs.sum(1, keepdim=True) % stride
    chosen = first + stride * torch.arange(number, device=able.device)
    return places.gather(1, chosen.clamp(max=size - 1 - width)).clamp(max=size - 1 - width), chosen < count
