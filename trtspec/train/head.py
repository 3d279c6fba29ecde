"""Common parts of training for all kinds of draft heads: their options, their initialisation, their export."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.methods.capture import default_capture_layers
from trtspec.methods.head import DraftHead
from trtspec.models.decoder import Decoder
from trtspec.models.specs import DecoderSpec
from trtspec.models.weights import DTYPES
from trtspec.ops.packing import unpack
from trtspec.train.checkpoint import write_atomically
from trtspec.train.data import Tokens
from trtspec.train.trainer import TrainConfig
from trtspec.train.training_batches import LAST_STATE
from trtspec.train.unrolled import HeadLoss, Objective, TrainingLoss

Head = TypeVar("Head", bound=DraftHead)


def setting(default: Any, text: str) -> Any:
    """Return a field of HeadOptions that is an option of the command line, too; `text` is its help.

    For a switch that is on by default, the help says what turning it off does.
    """
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ABC):
    """Options of a training run, with the methods in which kinds of heads differ; subclasses define these.

    The same options continue the run in `run`. Other options are refused there once the run has a checkpoint, except
    those in run.MAY_CHANGE.

    data: paths of one of these kinds.
    - Text files, folders of them, or .npy files of token ids.
    - .jsonl files of conversations, whose answers are taught; train.chat has the format.
    - Shards of hidden states (.safetensors), or folders of them. The head learns from shards as they are: nothing is
      regenerated, and the target does not run.

    regenerate: number of prompts that the target answers before the training, because the head will be used on the
    target's words and not on people's.
    - If `data` is text, prompts are cut from it, and the target continues each by `regenerate_len` tokens. The head
      learns from both, half and half.
    - If `data` is conversations, this number of them get the target's answers, of at most `regenerate_len` tokens
      each. The head learns from these alone.

    unroll: passes per training batch, which is the number of drafts per step that the head is made for. single_pass:
    the first share of the run, in which only the first pass is trained. Where one head makes all drafts, the other
    passes need little training after that.

    dtype: dtype of the arithmetic; weights are kept in fp32. "auto" is bfloat16 where the CPU has instructions for it.

    held_out: text, ids or conversations as in `data`, on which the head is measured during the training and at its end.
    The results are in run/metrics.jsonl and run/evaluation.json; chains explains the measurement.

    checkpoint_seconds: seconds between checkpoints; a kill costs at most the training of this time. states_gib: GiB of
    disk for the target's states of the data. They are kept in `run`, so that epochs after the first need not compute
    them again. They take at most half of the free space.
    """

    target: Path
    data: tuple[Path, ...]
    out: Path
    run: Path
    minutes: float | None = None
    steps: int | None = None
    regenerate: int = setting(
        2048, "prompts of the data that the target answers, or continues: what the head learns from; 0: none"
    )
    regenerate_len: int = setting(192, "tokens of each such answer, at most")
    regenerate_temperature: float = setting(0.0, "at which the target answers; 0: greedily")
    unroll: int = setting(4, "passes per training batch: the drafts per step it is made for")
    single_pass: float = setting(
        0.0, "a share of the run, its beginning, in which the first draft alone is taught: several times as fast"
    )
    seq_len: int = setting(256, "tokens per window of the data; conversations are cut there")
    batch_size: int = setting(8, "windows per optimizer step")
    learning_rate: float = setting(4e-3, "of the optimizers, after warm-up and before decay")
    seed: int = setting(0, "of the weights and of the order of the data")
    dtype: str = setting("auto", "of the arithmetic: bfloat16, float32, or auto, what the CPU is faster with")
    held_out: Path | None = None
    checkpoint_seconds: float = setting(60.0, "a kill costs at most the training of so long")
    states_gib: float = setting(8.0, "GiB of disk for what the target made of the data, for later epochs; 0: none")

    method: ClassVar[str]
    """The method of speculative_config that runs such a head; also the name of the kind."""

    objective: ClassVar[Objective] = Objective()

    simulated: ClassVar[bool] = True
    """Whether `held_out` is measured: drafts are simulated without an engine."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data=() is empty; give text files, folders of them, or .npy files of token ids")
        for name in ("unroll", "batch_size", "regenerate_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seq_len <= self.unroll + 1:
            raise ConfigError(f"seq_len={self.seq_len} must exceed unroll + 1 = {self.unroll + 1}")
        if self.regenerate and self.regenerate < self.batch_size:
            raise ConfigError(
                f"regenerate={self.regenerate} make no batch_size={self.batch_size}; use at least as many, or 0 to "
                "learn from the data alone"
            )
        for name in ("regenerate", "regenerate_temperature", "states_gib", "checkpoint_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        if self.held_out is not None and not self.simulated:
            raise ConfigError(
                f"held_out: drafts of kind {self.method!r} are not simulated; leave it unset, and measure the draft "
                "with trtspec bench"
            )
        if self.held_out is not None and self.regenerate_len < self.unroll + 2:
            raise ConfigError(
                f"regenerate_len={self.regenerate_len} is too short to measure unroll={self.unroll} drafts; use "
                f"at least {self.unroll + 2}"
            )
        if not 0 <= self.single_pass < 1:
            raise ConfigError(f"single_pass={self.single_pass} must be a share of the run, from 0 to less than 1")
        if self.single_pass and not self.one_head:
            raise ConfigError(
                f"single_pass={self.single_pass}: not all drafts of kind {self.method!r} come from one head, and the "
                "others would learn nothing meanwhile; leave it unset"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate={self.learning_rate} must be positive; the default is 4e-3")
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype={self.dtype!r}; use one of auto, {', '.join(DTYPES)}")
        if self.out.resolve() == self.target.resolve():
            raise ConfigError(f"out={self.out} is the target's folder, which would be overwritten; use another")
        self.train_config()

    def check_sizes(self, *names: str) -> None:
        """Raise ConfigError for the first of these options that is set and below 1."""
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; leave it out for the default")

    def train_config(self) -> TrainConfig:
        """Return the length and the learning rates of the run."""
        return TrainConfig(
            steps=self.steps,
            minutes=self.minutes,
            matrix_lr=self.learning_rate,
            other_lr=self.learning_rate,
            checkpoint_seconds=self.checkpoint_seconds,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the kind and all options as plain data.

        When a run is continued, all but run.MAY_CHANGE must be the same.
        """
        return json.loads(json.dumps({"kind": self.method, **asdict(self)}, default=str))  # type: ignore[no-any-return]

    # -- differences between kinds -------------------------------------------------------------------------------------

    def check_target(self, config: ModelConfig) -> None:  # noqa: B027 - most kinds take any target
        """Raise ConfigError or UnsupportedError if the target, or these options, do not allow such a head."""

    def layers_read(self, config: ModelConfig, saved: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the layers of the target whose states the head reads, "after layer i".

        saved: layers that the shards hold; None: there are no shards.
        """
        return LAST_STATE

    @property
    def moving(self) -> bool:
        """Whether each pass's rows are one position after those of the previous pass, as unrolled.unroll explains."""
        return True

    @property
    def one_head(self) -> bool:
        """Whether one head makes all drafts, each from its own output for the draft before."""
        return False

    def loss(self, head: DraftHead, target: Decoder, capture: tuple[int, ...]) -> TrainingLoss:
        """Return the loss that trains the head: unrolled over passes, unless a kind drafts in another way."""
        dtype = DTYPES[self.dtype]
        return HeadLoss(head, target, self.unroll, dtype, self.objective, capture, self.moving, self.single_pass)

    @abstractmethod
    def new_head(self, target: Decoder, capture: tuple[int, ...], tokens: Tokens) -> DraftHead:
        """Return an untrained head in fp32, seeded by torch's generator.

        The head shares what it does not learn with the target, which is frozen. tokens: ids like those that the head
        will predict.
        """

    @abstractmethod
    def export(self, head: DraftHead, config: ModelConfig, capture: tuple[int, ...]) -> None:
        """Write the head to `out`, in the public layout. config: the target's."""

    @property
    def usage(self) -> str:
        """Options of `trtspec generate` that use the trained head."""
        return f"--model {self.target} --spec-method {self.method} --spec-model {self.out} --spec-tokens {self.unroll}"


@dataclass(frozen=True, kw_only=True)
class CapturingOptions(HeadOptions):
    """Options of a head that reads the states of several layers.

    capture_layers: "after layer i"; None = the layers of the shards, or EAGLE3's default.
    """

    capture_layers: tuple[int, ...] | None = setting(
        None, 'layers of the target whose output the head reads, "after layer i" (default: EAGLE3\'s three)'
    )

    def layers_read(self, config: ModelConfig, saved: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the layers that the head reads. ConfigError for layers that the target does not have."""
        capture = self.capture_layers
        if capture is None:
            capture = default_capture_layers(config.num_layers) if saved is None else saved
        if not capture or any(not 0 <= i < config.num_layers for i in capture):
            raise ConfigError(
                f"capture_layers={capture}: the target has {config.num_layers} layers; use ids in "
                f"[0, {config.num_layers - 1}]"
            )
        if list(capture) != sorted(set(capture)):
            raise ConfigError(
                f"capture_layers={capture}: list each layer once, in ascending order, as engines read them"
            )
        return capture


def attached(head: Head, target: Decoder) -> Head:
    """Freeze the target, and return the head, which shares what it does not learn with the target.

    UnsupportedError if the head would learn through the target's lm_head and this is quantised.
    """
    head.share(target.embedding, target.head)
    if target.head.is_packed and any(module is target.head for module in head.modules()):
        raise UnsupportedError(
            "the target's lm_head is quantised, and such a head learns through it; train a head of kind eagle3, or "
            "for the target before its lm_head was quantised"
        )
    target.requires_grad_(False)
    return head


def plain_head(target: Decoder) -> Tensor:
    """Return the weight of the target's lm_head, [V, Ht] fp32; a packed weight is unpacked."""
    head = target.head
    return unpack(head.weight.detach(), head.scales, head.zeros, head.out_features, head.in_features)


def one_layer(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """Return the spec of a draft layer of the target's shape, without biases or windows.

    changes: fields of the spec that have other values.
    """
    plain = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
    return replace(spec, num_layers=1, windows=(None,), tie_word_embeddings=False, **{**plain, **changes})


@torch.no_grad()
def initialise_head(head: nn.Module) -> None:
    """Initialise the parameters: matrices are normal, norms 1, biases 0.

    The standard deviation of a matrix is 1/sqrt(inputs), and half of that if the matrix writes to the residual stream.
    """
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            writes = name.endswith(("attention.o.weight", "mlp.down.weight"))
            parameter.normal_(0.0, parameter.shape[1] ** -0.5 * (0.5 if writes else 1.0))


def layer_config(spec: DecoderSpec, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a head of one Llama layer, with the target's rotary positions."""
    return {
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        **{key: target.raw[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if key in target.raw},
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": min(target.eos_token_ids, default=None),
        "torch_dtype": dtype_name(dtype),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in config.json."""
    return str(dtype).removeprefix("torch.")


def write_head(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    """Write weights (as `dtype`, None = as they are) and config.json to `folder`.

    Each file is old or new, never half of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    staging = folder / "model.safetensors.tmp"
    save_file(saved, staging, metadata={"format": "pt"})
    staging.chmod(0o644)  # save_file makes its file private
    os.replace(staging, folder / "model.safetensors")
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
