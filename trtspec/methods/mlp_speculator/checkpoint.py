"""The config.json of an MLP speculator, in the layout of IBM's fms-extras, which vLLM reads too."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.config.checkpoint.folder import CheckpointConfig, head_reader
from trtspec.config.checkpoint.reader import short
from trtspec.config.speculation_plan import DraftInfo
from trtspec.config.speculative import SpeculativeConfig

MLP_SPECULATOR = "mlp_speculator"


@dataclass(frozen=True)
class MLPSpeculatorConfig:
    """The config of an MLP speculator.

    n_predict: number of stages, each of which drafts one token. hidden_size (`emb_dim`), vocab_size: None = the
    target's. inner_size: width of the state, None = hidden_size. tie_weights: the stages share the weights whose shapes
    fit. scale_input: the target's state is normalised first.
    """

    n_predict: int
    hidden_size: int | None
    vocab_size: int | None
    inner_size: int | None
    tie_weights: bool
    scale_input: bool

    @classmethod
    def of(cls, config: CheckpointConfig) -> MLPSpeculatorConfig:
        """Read the config. UnsupportedError for checkpoints of another kind, CheckpointError for invalid fields.

        top_k_tokens_per_head and n_candidates shape upstream's tree of candidates. They are not used here, because
        drafts are a chain.
        """
        read = head_reader(config, MLP_SPECULATOR, "MLP speculator")
        n_predict, widths = read.positive_int("n_predict", 3), read.get("top_k_tokens_per_head")
        if widths is not None and (not isinstance(widths, list) or len(widths) != n_predict):
            raise read.error(
                "top_k_tokens_per_head", f"= {short(widths)} does not list n_predict = {n_predict} numbers"
            )
        tie_weights = read.boolean("tie_weights", False)
        if tie_weights and n_predict == 1:
            raise read.error("tie_weights", "= true with n_predict = 1, where nothing can be shared; set it to false")
        return cls(
            n_predict=n_predict,
            hidden_size=read.optional_positive_int("hidden_size" if read.get("emb_dim") is None else "emb_dim"),
            vocab_size=read.optional_positive_int("vocab_size"),
            inner_size=read.optional_positive_int("inner_dim") if read.get("inner_dim") != 0 else None,
            tie_weights=tie_weights,
            scale_input=read.boolean("scale_input", False),
        )


def recognises(checkpoint: CheckpointConfig) -> bool:
    """Whether config.json declares an MLP speculator."""
    return checkpoint.model_type == MLP_SPECULATOR


def read(checkpoint: CheckpointConfig, config: SpeculativeConfig) -> DraftInfo:
    """Return the facts about the speculator that planning needs. Raises as MLPSpeculatorConfig.of does."""
    head_config = MLPSpeculatorConfig.of(checkpoint)
    return DraftInfo(
        method=MLP_SPECULATOR, vocab_size=head_config.vocab_size, n_predict=head_config.n_predict, checkpoint=checkpoint
    )
