"""Training of MTP modules (methods.mtp.head) for a target that was trained without them.

Papers: DeepSeek-AI, arXiv 2412.19437, section 2.2; Xiaomi, arXiv 2505.07608. The target is frozen, and so are the
embedding and lm_head that modules share.

The papers' loss is cross-entropy of module i with the token that it guesses; here the label is the target's own output
there. A single module that makes all drafts is unrolled as EAGLE3 heads are, so that it learns to read its own output.
With a module for every draft, module i reads the output of module i - 1 at the same position, as in DeepSeek's
training.

The result is a whole checkpoint: the target and its modules in MiMo's layout, which is Qwen2's with
`model.mtp_layers.{i}.*`. Qwen2's layers are Llama's with biases of q, k and v. If the target has none, they are written
as zeros; x + 0 is x, so the checkpoint computes what the target computes. Its lm_head is written out even if the target
ties it to its embedding, as in public MiMo checkpoints.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.head import DraftHead
from trtspec.methods.mtp.checkpoint import MIMO, mtp_capture_layers
from trtspec.methods.mtp.head import MtpHead, MtpSpec
from trtspec.methods.mtp.weights import MtpWeights
from trtspec.models.decoder import Decoder
from trtspec.models.slots import weight_slots
from trtspec.models.specs import decoder_spec, mtp_prefix
from trtspec.models.weights import checkpoint_tensors, tensors_of
from trtspec.train.checkpoint import write_atomically
from trtspec.train.data import Tokens
from trtspec.train.head import HeadOptions, attached, initialise_head, one_layer, setting, write_head

ARCHITECTURE = "MiMoForCausalLM"
NOT_COPIED = ("config.json", "MODEL_CARD.md", "README.md")
"""Files of a target's folder that are not copied to the checkpoint made of it."""

CONFIGURATION = '''\
"""What transformers needs to read this folder's config.json: Qwen2's fields, and how many MTP layers there are."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers=0, **kwargs):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(**kwargs)
'''


@dataclass(frozen=True, kw_only=True)
class MtpOptions(HeadOptions):
    """Options for training MTP modules. modules: 1, which makes all drafts, or `unroll`, one for each draft."""

    method: ClassVar[str] = "mtp"

    modules: int = setting(1, "1, which makes all drafts, or as many as --unroll, one for each")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modules not in (1, self.unroll):
            raise ConfigError(
                f"modules={self.modules} with unroll={self.unroll}: use 1, for all drafts, or unroll, one for each"
            )

    def check_target(self, config: ModelConfig) -> None:
        """Raise UnsupportedError for targets that MiMo's layout cannot hold."""
        spec = decoder_spec(config)
        wrong = {
            "quantised weights": config.quantization is not None,
            "sliding windows": any(spec.windows),
            "norms of queries and keys": spec.qk_norm,
            "biases of its output projections or MLPs": spec.o_bias or spec.mlp_bias,
            "heads of another size than hidden_size / num_attention_heads": (
                spec.head_dim * spec.num_heads != spec.hidden_size
            ),
        }
        if any(wrong.values()):
            raise UnsupportedError(
                f"target model {config.path} has {', '.join(name for name, is_so in wrong.items() if is_so)}, which "
                "MiMo's layout, in which MTP layers are written, does not; train another kind of draft for it"
            )

    def layers_read(self, config: ModelConfig, saved: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the layers of the target that modules of MiMo's family read."""
        return mtp_capture_layers("mimo", config.num_layers)

    @property
    def moving(self) -> bool:
        """Whether each pass's rows are one position further (train.unrolled.unroll): with a single module."""
        return self.modules == 1

    @property
    def one_head(self) -> bool:
        """Whether one module makes all drafts."""
        return self.modules == 1

    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> MtpHead:
        """Return untrained modules for the target."""
        layer = one_layer(target.spec, qkv_bias=True)
        head = MtpHead(MtpSpec(layer, MIMO, self.modules, mtp_prefix(ARCHITECTURE, self.out)))
        initialise_head(head)
        return attached(head, target)

    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the whole checkpoint to `out`: weights in the target's dtype, and the target's other files."""
        assert isinstance(head, MtpHead)
        tensors = _as_qwen2(config)
        dtype = tensors["model.norm.weight"].dtype
        modules = tensors_of(head, MtpWeights.slots(head.spec))
        tensors |= {name: tensor.to(dtype) for name, tensor in modules.items()}
        self.out.mkdir(parents=True, exist_ok=True)
        for file in sorted(config.path.iterdir()):
            # tokenizer, chat template, generation config; weights and their index are written anew
            text = file.suffix in (".json", ".txt", ".jinja", ".model") and not file.name.endswith(".index.json")
            if text and file.name not in NOT_COPIED:
                shutil.copyfile(file, self.out / file.name)
        write_atomically(self.out / "configuration_mimo.py", CONFIGURATION.encode())
        write_head(self.out, tensors, _mimo_config(config, self.modules), None)

    @property
    def usage(self) -> str:
        """Options of `trtspec generate` that use the trained checkpoint."""
        return f"--model {self.out} --spec-method mtp --spec-tokens {self.unroll}"


def _as_qwen2(config: ModelConfig) -> dict[str, Tensor]:
    """Return the target's weights, as they are in its folder, under the names of an untied Qwen2."""
    spec = decoder_spec(config)
    slots = weight_slots(dataclasses.replace(spec, qkv_bias=True, tie_word_embeddings=False))
    own = weight_slots(spec)
    tensors = dict(checkpoint_tensors(config.path, "target", lambda name: name in own))
    embedding = tensors["model.embed_tokens.weight"]
    for name, slot in slots.items():
        if name == "lm_head.weight":
            tensors.setdefault(name, embedding.clone())
        elif name.endswith(".bias"):
            tensors.setdefault(name, torch.zeros(slot.shape, dtype=embedding.dtype))
    return tensors


def _mimo_config(config: ModelConfig, modules: int) -> dict[str, Any]:
    """Return the target's config.json in MiMo's layout."""
    dropped = ("layer_types", "mlp_bias", "sliding_window", "max_window_layers")
    return {
        **{key: value for key, value in config.raw.items() if key not in dropped},
        "architectures": [ARCHITECTURE],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "num_nextn_predict_layers": modules,
        "attention_bias": True,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
