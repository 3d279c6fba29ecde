"""A decoder as a trainable language model over whole windows, and the two losses that train it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.config.checkpoint.model import RopeConfig
from trtspec.models.decoder import Decoder
from trtspec.models.specs import DecoderSpec

LossFn = Callable[..., Tensor]
"""A function from the tensors of a source's batch to the mean loss per token in nats.

The first tensor is inputs [B, S]; a language model's second is next tokens [B, S].
"""


def llama_spec(
    vocab_size: int,
    num_layers: int,
    hidden_size: int = 256,
    intermediate_size: int = 768,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    max_positions: int = 2048,
) -> DecoderSpec:
    """Return the spec of a Llama-shaped decoder with tied embeddings; the defaults are the demo's."""
    return DecoderSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0, original_max_position_embeddings=max_positions),
        max_position_embeddings=max_positions,
        windows=(None,) * num_layers,
        tie_word_embeddings=True,
    )


def heads_first(x: Tensor, batch: int) -> Tensor:
    """Return packed rows [batch * S, heads, D] as [batch, heads, S, D]."""
    return x.view(batch, -1, x.shape[-2], x.shape[-1]).transpose(1, 2)


class CausalAttend:
    """A causal attention over `batch` windows of equal length, packed one after another into T = batch * seq rows.

    texts [B, S]: number of the text, within its window, that a row belongs to. A row attends only to rows of its own
    text. None: every window is one text.
    """

    def __init__(self, batch: int, texts: Tensor | None = None) -> None:
        self.batch, self.texts = batch, texts
        self.mask = None if texts is None or not texts.any() else self.seen()

    def seen(self) -> Tensor:
        """Mask [B, 1, S, S] bool of the rows that each row attends to."""
        assert self.texts is not None
        same = self.texts[:, None, :, None] == self.texts[:, None, None, :]
        return same & torch.ones_like(same[0, 0]).tril()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        # repeat explicitly: with enable_gqa the CPU kernel has no fused backward
        keys, values = (heads_first(x.repeat_interleave(groups, dim=1), self.batch) for x in (k, v))
        whole = self.mask is None
        out = F.scaled_dot_product_attention(
            heads_first(q, self.batch), keys, values, attn_mask=self.mask, is_causal=whole
        )
        return out.transpose(1, 2).reshape(q.shape)


class LanguageModel(nn.Module):
    """A decoder as a module: input ids [B, S] -> logits [B * S, V] fp32."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor) -> Tensor:
        batch, seq = ids.shape
        positions = torch.arange(seq, device=ids.device).repeat(batch)
        hidden = self.decoder(ids.reshape(-1), positions, CausalAttend(batch))
        return self.decoder.logits(hidden)


@torch.no_grad()
def initialise(decoder: Decoder, seed: int) -> Decoder:
    """Set fresh weights of normal(0, 0.02), and return the decoder.

    Matrices that write to the residual stream are smaller by sqrt(2 * layers).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            writes = name.endswith(("attention.o.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * decoder.spec.num_layers) if writes else 0.02
            parameter.normal_(0.0, std, generator=generator)
    return decoder


def logits_in(model: LanguageModel, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Return the model's logits, computed with its weights cast to `dtype`.

    Gradients reach the uncast (fp32) weights. Autocast would not do. With every weight and activation in bf16, training
    sees the arithmetic that inference will use. And a CPU, which spends much of the time moving activations, moves half
    the bytes.
    """
    weights = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    logits: Tensor = torch.func.functional_call(model, weights, (ids,))
    return logits


def next_token_loss(model: LanguageModel, dtype: torch.dtype) -> LossFn:
    """Return a loss: cross-entropy with the corpus."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits_in(model, dtype, inputs), targets.reshape(-1))

    return loss


def distillation_loss(student: LanguageModel, teacher: LanguageModel, dtype: torch.dtype, hard: float = 0.5) -> LossFn:
    """Return a loss: cross-entropy with the teacher.

    `hard` of it is against the teacher's arg-max, the rest against its distribution. The arg-max is what counts when a
    draft is verified greedily; the distribution teaches more per token.
    """

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits_in(teacher, dtype, inputs)
        log_probs = F.log_softmax(logits_in(student, dtype, inputs), dim=-1)
        soft = -(F.softmax(wanted, dim=-1) * log_probs).sum(-1).mean()
        return hard * F.nll_loss(log_probs, wanted.argmax(-1)) + (1.0 - hard) * soft

    return loss


Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(loss: Function) -> Function:
    """Return `loss` through torch.compile if there is a C++ compiler, else `loss` itself.

    The first call of a compiled loss takes a minute.
    """
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        return loss
    return cast(Function, torch.compile(loss, dynamic=False))
