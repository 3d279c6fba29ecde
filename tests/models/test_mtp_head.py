"""MTP modules: the arithmetic, one module for all drafts or one for each, and the checkpoints that are refused.

The oracle is written from the equations (DeepSeek-V3, arXiv 2412.19437, section 2.2; order of inputs as MiMo's) around
transformers' own Qwen2 layer. It has no cache: it computes every pass over the whole text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from tests.checkpoints import edit_config, edit_tensors, make_checkpoint, make_mimo, oracle
from tests.models.built_heads import head_of
from tests.models.head_session import Watching, assert_close, open_session, states, told
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import KVSpec
from trtspec.errors import CheckpointError, ConfigError, TrtSpecError, UnsupportedError, WeightsError
from trtspec.methods.mtp.checkpoint import MIMO, MTP_TARGETS, MtpFamily
from trtspec.methods.mtp.worker import MtpWorker
from trtspec.methods.worker import SpecWorker
from trtspec.models.weights import load_decoder

VOCAB = 199
TOLERANCE = 1e-4
PREFIX = "model.mtp_layers."

# A family with every switch opposite to MiMo's, under other names.
OTHER = MtpFamily("enorm", "hnorm", "eh_proj", "shared_head.norm", head="shared_head.head")


class WatchingMtp(Watching, MtpWorker):
    """A worker that has a module for each draft and keeps the outputs of every pass."""


@dataclass(frozen=True)
class Pass:
    """The output of a pass at its last row, and the draft taken there."""

    y: Tensor  # [H]
    logits: Tensor  # [V]
    draft: int


class Modules:
    """All MTP modules of a checkpoint, fp32."""

    def __init__(self, folder: Path, target: transformers.PreTrainedModel, family: MtpFamily) -> None:
        self.target, self.family, self.config = target, family, target.config
        self.rotary = Qwen2RotaryEmbedding(self.config)
        tensors = load_file(folder / "model.safetensors")
        self.w: list[dict[str, Tensor]] = []
        self.layers: list[Qwen2DecoderLayer] = []
        while own := {
            name.removeprefix(prefix): tensor
            for prefix in [f"{PREFIX}{len(self.w)}."]
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }:
            layer = Qwen2DecoderLayer(self.config, self.config.num_hidden_layers - 1)
            names = layer.state_dict().keys()
            layer.load_state_dict({name: own[name] for name in names})
            self.w.append(own)
            self.layers.append(layer.eval().requires_grad_(False))

    def one_for_all(self, h: Tensor, known: list[int], num_drafts: int) -> list[Pass]:
        """Run module 0 for all drafts on the target's states h [n, H] of all known tokens but the last.

        Pass 0 runs over all n rows. Each further pass adds a row: the token just drafted, with the last row's output in
        place of a state.
        """
        tokens, passes = known[1:], []
        for _ in range(num_drafts):
            passes.append(self.last(0, self.module(0, tokens, h)))
            tokens, h = [*tokens, passes[-1].draft], torch.cat((h, passes[-1].y[None]))
        return passes

    def one_for_each(self, h: Tensor, known: list[int], num_drafts: int) -> list[Pass]:
        """Run a module for each draft over the same rows in every pass.

        Module i reads the outputs of module i - 1, with the tokens shifted one further on.
        """
        tokens, passes = known[1:], []
        for i in range(num_drafts):
            h = self.module(i, tokens, h)
            passes.append(self.last(i, h))
            tokens = [*tokens[1:], passes[-1].draft]
        return passes

    def module(self, i: int, tokens: list[int], h: Tensor) -> Tensor:
        """Run module i over a whole text, on the token and the vector of each position -> [n, H]."""
        n, family = len(tokens), self.family
        e = self.target.get_input_embeddings().weight[tokens].clone()
        if family.zero_first:
            e[0] = 0.0
        e, h = self.norm(i, family.token_norm, e), self.norm(i, family.hidden_norm, h)
        x = torch.cat((h, e) if family.hidden_first else (e, h), dim=-1) @ self.w[i][f"{family.projection}.weight"].T
        distance = torch.arange(n)[:, None] - torch.arange(n)
        windowed = self.config.layer_types[-1] == "sliding_attention"
        hidden = (distance < 0) | ((distance >= self.config.sliding_window) if windowed else False)
        mask = torch.zeros(n, n).masked_fill(hidden, float("-inf"))[None, None]
        out = self.layers[i](
            x[None], attention_mask=mask, position_embeddings=self.rotary(x[None], torch.arange(n)[None])
        )
        return self.norm(i, family.norm, (out if isinstance(out, Tensor) else out[0])[0])

    def last(self, i: int, y: Tensor) -> Pass:
        own = self.family.head
        head = self.target.get_output_embeddings().weight if own is None else self.w[i][f"{own}.weight"]
        logits = y[-1] @ head.T
        return Pass(y[-1], logits, int(logits.argmax()))

    def norm(self, i: int, name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self.w[i][f"{name}.weight"]


@dataclass(frozen=True)
class Variant:
    """A target, and the family of its modules."""

    family: MtpFamily = MIMO
    target: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "mimo": Variant(),
    "tied": Variant(target={"tie_word_embeddings": True}),
    "windowed": Variant(
        target={"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1, "num_key_value_heads": 4}
    ),
    "another family": Variant(OTHER),
}


def turn_into(folder: Path, family: MtpFamily, num_modules: int) -> None:
    """Rename the parts of MiMo's modules as `family` names them, and add lm_heads if it has them."""
    parts = [
        (getattr(MIMO, part), getattr(family, part)) for part in ("token_norm", "hidden_norm", "projection", "norm")
    ]
    generator = torch.Generator().manual_seed(7)

    def change(tensors: dict[str, Tensor]) -> None:
        for i in range(num_modules):
            prefix = f"{PREFIX}{i}."
            for old, new in parts:
                tensors[f"{prefix}{new}.weight"] = tensors.pop(f"{prefix}{old}.weight")
            if family.head is not None:
                random = torch.randn(tensors["lm_head.weight"].shape, generator=generator)
                tensors[f"{prefix}{family.head}.weight"] = random / 8

    edit_tensors(folder, change)


def check_passes(
    folder: Path, family: MtpFamily, num_modules: int, num_drafts: int, lengths: tuple[int, ...], each: bool
) -> None:
    """Launch prompts, then drafts of which none, some and all are accepted; rejected drafts must leave no trace."""
    config, theirs = ModelConfig.from_folder(folder), oracle(folder)
    decoder = load_decoder(config, torch.float32)
    kind: Callable[..., SpecWorker] = WatchingMtp if each else Watching
    capture = (config.num_layers - 1 if family.before_norm else -1,)
    worker = kind(head_of("mtp", folder, decoder, num_stages=num_modules), num_drafts, capture)
    modules, generator = Modules(folder, theirs, family), torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    session = open_session(decoder, worker, prompts)
    for accepted in (None, *(number for number in (2, 0, 0, 4, 1, 3, 1, 1, 0) if number <= num_drafts)):
        drafts = [[] if accepted is None else told(theirs, known, accepted, num_drafts) for known in session.known]
        outputs = session.launch(drafts)
        assert outputs.verdict is not None
        assert outputs.proposal is not None
        assert outputs.verdict.num_tokens.tolist() == [1 if accepted is None else accepted + 1] * len(lengths)
        for b, known in enumerate(session.known):
            h, _ = states(theirs, known[:-1], capture)
            passes = (modules.one_for_each if each else modules.one_for_all)(h, known, num_drafts)
            for j, expected in enumerate(passes):
                assert_close(session.worker.rows[j][b], expected.y, TOLERANCE)
                assert_close(session.worker.scores[j][b], expected.logits, TOLERANCE)
            assert outputs.proposal.draft_tokens[b].tolist() == [expected.draft for expected in passes]


@pytest.fixture
def family_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, MtpFamily, int], None]:
    """Function that turns a MiMo checkpoint's modules into those of another family, with a row in MTP_TARGETS."""

    def change(folder: Path, family: MtpFamily, num_modules: int) -> None:
        if family is not MIMO:
            turn_into(folder, family, num_modules)
            monkeypatch.setitem(MTP_TARGETS, "mimo", dataclasses.replace(MTP_TARGETS["mimo"], family=family))

    return change


Change = Callable[[Path, MtpFamily, int], None]


@pytest.mark.parametrize("name", VARIANTS)
def test_one_module_for_all_drafts(tmp_path: Path, family_of: Change, name: str) -> None:
    variant = VARIANTS[name]
    folder = make_mimo(tmp_path, 2, initializer_range=0.06, **variant.target)
    family_of(folder, variant.family, 2)
    check_passes(folder, variant.family, 1, 4, (60, 1, 7), each=False)


@pytest.mark.parametrize(
    ("name", "num_modules"),
    [
        pytest.param(name, number, marks=[] if name == "mimo" or number == 3 else [pytest.mark.long])
        for name in VARIANTS
        for number in (1, 2, 3)
    ],
)
def test_a_module_for_each_draft(tmp_path: Path, family_of: Change, name: str, num_modules: int) -> None:
    """Every pass equals the oracle's, also for prompts that are shorter than the depth of a module."""
    variant = VARIANTS[name]
    folder = make_mimo(tmp_path, num_modules, initializer_range=0.06, **variant.target)
    family_of(folder, variant.family, num_modules)
    check_passes(folder, variant.family, num_modules, num_modules, (1, 40, 2, 3, 4), each=True)


@pytest.mark.parametrize("wanted", [1, 2])
def test_weights_that_are_read_and_counted(tmp_path: Path, wanted: int) -> None:
    """A head reads and counts only modules that run; a described head equals the loaded one."""
    config = ModelConfig.from_folder(make_mimo(tmp_path, 3))
    decoder = load_decoder(config, torch.float32)
    head = head_of("mtp", config.path, decoder, num_stages=wanted)
    saved = load_file(config.path / "model.safetensors")
    own = sum(
        tensor.nbytes for name, tensor in saved.items() for i in range(wanted) if name.startswith(f"{PREFIX}{i}.")
    )
    assert head.weight_bytes_for(wanted) == own + wanted * saved["lm_head.weight"].nbytes
    assert not any(parameter.isnan().any() for parameter in head.parameters())
    assert (head.embedding, head.head) == (decoder.embedding, decoder.head)
    described = head_of("mtp", config.path, decoder, num_stages=wanted, reads_weights=False)
    shapes, expected = ({name: p.shape for name, p in one.mtp.named_parameters()} for one in (described, head))
    assert shapes == expected
    assert all(parameter.is_meta for parameter in described.mtp.parameters())
    assert described.kv_layers == head.kv_layers == (KVSpec(2, 16),) * wanted


# -- what is refused -------------------------------------------------------------------------------------------------

MTP = {"method": "mtp", "num_speculative_tokens": 2}


def test_without_a_number_all_modules_draft(tmp_path: Path) -> None:
    with LLM(make_mimo(tmp_path, 2), {"method": "mtp"}) as llm:
        assert llm.engine.loop.proposer.speculation is not None
        assert llm.engine.loop.proposer.speculation.num_speculative_tokens == 2


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, change)


def fields(**changed: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, **changed)


PROJECTION = "model.mtp_layers.1.input_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], type[TrtSpecError], tuple[str, ...]]] = {
    "a tensor that is missing": (
        tensors(lambda t: t.pop(PROJECTION)),
        {},
        WeightsError,
        (f"missing: {PROJECTION} (64",),
    ),
    "a tensor too many": (
        tensors(lambda t: t.update({"model.mtp_layers.0.extra.weight": torch.zeros(2)})),
        {},
        WeightsError,
        ("unexpected: model.mtp_layers.0.extra.weight", "MTP weights in"),
    ),
    "another shape": (
        tensors(lambda t: t.update({PROJECTION: torch.zeros(64, 64)})),
        {},
        WeightsError,
        (f"{PROJECTION} is (64, 64), expected (64, 128)",),
    ),
    "fewer modules than it says": (
        fields(num_nextn_predict_layers=3),
        {},
        WeightsError,
        ("missing: model.mtp_layers.2.final_layernorm.weight (64,)", "and 8 more"),
    ),
    "more modules than it says": (
        fields(num_nextn_predict_layers=1),
        {"num_speculative_tokens": 1},
        WeightsError,
        ("unexpected: model.mtp_layers.1.",),
    ),
    "no modules": (
        fields(num_nextn_predict_layers=0),
        {},
        ConfigError,
        ("num_nextn_predict_layers is missing or 0", "config.json", "another method"),
    ),
    "no word of modules": (
        fields(num_nextn_predict_layers=None),
        {"num_speculative_tokens": None},
        ConfigError,
        ("num_nextn_predict_layers is missing or 0",),
    ),
    "no number of modules": (
        fields(num_nextn_predict_layers="2"),
        {},
        CheckpointError,
        ("num_nextn_predict_layers = '2'", "config.json"),
    ),
    "a family that is not built": (
        fields(model_type="deepseek_v3"),
        {},
        UnsupportedError,
        ("model_type='deepseek_v3'", "not built", "those of mimo run"),
    ),
    "a target without modules": (
        fields(model_type="llama"),
        {},
        UnsupportedError,
        ("model_type='llama'", "not known", "those of mimo run"),
    ),
    "more drafts than modules": (
        lambda folder: None,
        {"num_speculative_tokens": 4, "vanilla": True},
        ConfigError,
        ("num_speculative_tokens=4 with n_predict=2", "at most 2", "vanilla=False"),
    ),
    "drafts that modules do not divide": (
        lambda folder: None,
        {"num_speculative_tokens": 5},
        ConfigError,
        ("num_speculative_tokens=5 must be divisible by n_predict=2", "use 4"),
    ),
    "a draft checkpoint": (
        lambda folder: None,
        {"model": "elsewhere"},
        ConfigError,
        ("model='elsewhere'", "target's own checkpoint", "leave model unset"),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_an_error_that_helps(tmp_path: Path, what: str) -> None:
    change, wishes, error, words = BAD[what]
    folder = make_mimo(tmp_path, 2)
    change(folder)
    with pytest.raises(error) as caught:
        LLM(folder, {**MTP, **wishes})
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, caught.value


def test_blocks_smaller_than_modules_are_deep(tmp_path: Path) -> None:
    """A block_size below the number of modules is refused.

    The KV of a block may depend on no more than the tokens of the next block.
    """
    folder = make_mimo(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"block_size = 2 is too small for MTP with 3 modules.*raise it to 3 or more"):
        LLM(folder, {"method": "mtp"}, block_size=2)
    LLM(folder, {"method": "mtp"}, block_size=3).shutdown()


def test_a_target_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    with pytest.raises(UnsupportedError, match="model_type='qwen2'"):
        LLM(folder, MTP)
