"""EAGLE checkpoints: strict loading of the public layout.

The layout:

- `fc.weight` [H, 2H], whose columns read [embedding ; hidden state]
- `fc.bias` [H], or none
- `layers.{i}.*` as in Llama, `layers.0` without input_layernorm
- `embed_tokens.weight` and `lm_head.weight` [V, H], both optional; published files have the target's embedding

Some exporters put `model.` before every name. Where an embedding or lm_head is missing or equals the target's, the
target's is used, and is held once. Others are used as they are; vLLM uses the target's, whatever the file has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from trtspec.errors import UnsupportedError
from trtspec.methods.eagle.checkpoint import EagleHeadConfig
from trtspec.methods.eagle.head import EagleHead, EagleSpec
from trtspec.methods.head_weights import HeadSource, HeadWeights, module_of
from trtspec.models.decoder import Decoder
from trtspec.models.slots import Slot, layer_slots
from trtspec.models.specs import ARCHITECTURES, DecoderSpec, dense_spec
from trtspec.models.weights import missing_weights, same_tensor

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


class EagleWeights(HeadWeights[EagleSpec]):
    """The layout of EAGLE heads. The tensors decide which biases and norms a head has.

    The name of its architecture does not determine them. Without weights, fc has a bias unless config.json says no, and
    other biases are as config.json says. There are then no norms of queries and keys, and the embedding and lm_head are
    the target's.
    """

    prefix = "model."

    def __init__(self, source: HeadSource, target: Decoder) -> None:
        super().__init__(source, target)
        self.head_config = EagleHeadConfig.of(source.decoder)

    def spec(self, found: Mapping[str, Tensor] | None) -> EagleSpec:
        config, target, names = self.source.decoder, self.target.spec, found or {}
        self.check_made_for(
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
        )
        fc_bias = self.head_config.fc_bias is True or "fc.bias" in names
        return EagleSpec(
            decoder=self._decoder(names),
            fc_bias=fc_bias if names else self.head_config.fc_bias is not False,
            own_embedding=_EMBEDDING in names and self._differs(_EMBEDDING),
            own_head="lm_head" in map(module_of, names) and (_HEAD not in names or self._differs(_HEAD)),
        )

    @staticmethod
    def slots(spec: EagleSpec) -> dict[str, Slot]:
        H, V = spec.decoder.hidden_size, spec.decoder.vocab_size
        slots = {"fc.weight": Slot("fc.weight", 0, (H, 2 * H))}
        if spec.fc_bias:
            slots["fc.bias"] = Slot("fc.bias", 0, (H,))
        for layer in range(spec.decoder.num_layers):
            slots |= layer_slots(spec.decoder, f"layers.{layer}.", f"layers.{layer}.", H)
        del slots["layers.0.input_layernorm.weight"]
        if spec.own_embedding:
            slots[_EMBEDDING] = Slot("embedding.weight", 0, (V, H))
        if spec.own_head:
            slots[_HEAD] = Slot("head.weight", 0, (V, H))
        return slots

    def module(self, spec: EagleSpec) -> EagleHead:
        return EagleHead(spec, self.first_layer, self.source.max_seq_len)

    def held(self, spec: EagleSpec, name: str, tensor: Tensor, ids: Tensor | None) -> Tensor | None:
        """Return the tensor; None for an embedding or lm_head in whose place the target's is used."""
        return None if name in (_EMBEDDING, _HEAD) and name not in self.slots(spec) else tensor

    def _decoder(self, names: Mapping[str, Tensor]) -> DecoderSpec:
        """Return the spec of the head's layers, with the biases and norms that the tensors show."""
        config = self.source.decoder
        if config.architecture.removeprefix("Eagle") not in ARCHITECTURES:
            raise UnsupportedError(
                f"draft model {config.path}: architecture {config.architecture!r} is no EAGLE head we run; supported: "
                f"{', '.join(ARCHITECTURES)}, each also with Eagle before its name"
            )

        def has(*ends: str) -> bool:
            return any(name.endswith(ends) for name in names)

        said = dense_spec(config)
        return dataclasses.replace(
            said,
            qkv_bias=said.qkv_bias or has("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            o_bias=said.o_bias or has("o_proj.bias"),
            mlp_bias=said.mlp_bias or has("gate_proj.bias", "up_proj.bias", "down_proj.bias"),
            qk_norm=has("q_norm.weight", "k_norm.weight"),
        )

    def _differs(self, name: str) -> bool:
        """Whether a given embedding or lm_head differs from the target's. False if the target has no weights."""
        path, owner, target = self.source.checkpoint.path, self.source.owner.path, self.target
        if missing_weights(owner, "target"):
            return False
        theirs = name if name == _HEAD and not target.spec.tie_word_embeddings else f"model.{_EMBEDDING}"
        dtype = target.norm.weight.dtype
        return not any(
            same_tensor((path, own, self.role), (owner, theirs, "target"), dtype) for own in (name, f"model.{name}")
        )
