"""Heads of every kind in training.

Unrolled passes are inference, losses are those of the papers, and an export holds what was trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.checkpoints import make_checkpoint, oracle
from tests.e2e.training import make_training_batch
from tests.models.built_heads import head_of
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.core import AttnMetadata
from trtspec.errors import ConfigError, UnsupportedError
from trtspec.kv.pool import allocate_layers
from trtspec.methods.eagle.train import EagleOptions
from trtspec.methods.head import DraftHead
from trtspec.methods.medusa.train import MedusaOptions
from trtspec.methods.mlp_speculator.train import MLPSpeculatorOptions
from trtspec.methods.mtp.train import MtpOptions
from trtspec.models.attention import PagedAttend
from trtspec.models.decoder import Decoder
from trtspec.models.layers import Linear
from trtspec.models.weights import load_decoder
from trtspec.train.head import HeadOptions
from trtspec.train.training_batches import LAST_STATE, TrainingBatch, observe
from trtspec.train.unrolled import HeadLoss, unroll

pytestmark = pytest.mark.slow

VOCAB, LAYERS, K, SEQ, BATCH = 40, 2, 3, 14, 2
TARGET = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "tie_word_embeddings": True}

Load = Callable[[ModelConfig, Decoder, Path], DraftHead]
Make = Callable[..., HeadOptions]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of head: its options, and the function that loads its folder again."""

    options: type[HeadOptions]
    load: Load
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


KINDS = {
    "eagle": Kind(EagleOptions, lambda owner, target, out: head_of("eagle", out, target, owner.path)),
    "medusa": Kind(
        MedusaOptions,
        lambda owner, target, out: head_of("medusa", out, target, num_stages=K),
        {"num_layers": 2},
    ),
    "mlp_speculator": Kind(
        MLPSpeculatorOptions,
        lambda owner, target, out: head_of("mlp_speculator", out, target, num_stages=K),
        {"inner_size": 24},
    ),
    "mlp_speculator, tied": Kind(
        MLPSpeculatorOptions,
        lambda owner, target, out: head_of("mlp_speculator", out, target, num_stages=K),
        {"tie_weights": True},
    ),
    "mtp": Kind(MtpOptions, lambda owner, target, out: modules_of(out, 1)),
    "mtp of K modules": Kind(MtpOptions, lambda owner, target, out: modules_of(out, K), {"modules": K}),
}


def modules_of(folder: Path, count: int) -> DraftHead:
    """MTP modules of a folder. Their target is that of the same folder."""
    target = load_decoder(ModelConfig.from_folder(folder), torch.float32)
    return head_of("mtp", folder, target, num_stages=count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", **TARGET)


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Make:
    def make(kind: type[HeadOptions], **fields: Any) -> HeadOptions:
        paths = {"target": folder, "data": (tmp_path / "text",), "out": tmp_path / "out", "run": tmp_path / "run"}
        return kind(**{**paths, "steps": 1, "unroll": K, **fields})

    return make


def new_head(options: HeadOptions, target: Decoder, seed: int = 1) -> DraftHead:
    """An untrained head, except that nothing in it is 0 or 1 any more."""
    torch.manual_seed(seed)
    shared = {id(parameter) for parameter in target.parameters()}
    head = options.new_head(target, options.layers_read(ModelConfig.from_folder(options.target), None), torch.empty(0))
    for parameter in head.parameters():
        if id(parameter) not in shared:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return head.train()


def training_batch(target: Decoder, capture: tuple[int, ...]) -> TrainingBatch:
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(2))
    return make_training_batch(target, capture, ids)


@torch.no_grad()
def passes_of(head: DraftHead, training_batch: TrainingBatch, moving: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the output [B, S, W] and the logits [B, S, Vd] of each pass."""
    outputs = unroll(
        head, training_batch.inputs, training_batch.places, training_batch.captured.flatten(0, 1), K, moving
    )
    shape = training_batch.inputs.shape
    return [(y.view(*shape, -1), head.logits(y, j).view(*shape, -1)) for j, y in enumerate(outputs)]


@torch.no_grad()
def chain(head: DraftHead, captured: Tensor, tokens: Tensor) -> list[Tensor]:
    """Run a chain of one head, and return the last row of each pass.

    Rows 0..p of captured [p + 1, H] go into a paged cache, then one row at a time. tokens [>= p + K]: the token after
    each row, then those of the chain.
    """
    rows = len(captured)
    kv = allocate_layers(head.kv_layers, num_blocks=4, block_size=16, dtype=torch.float32)
    attend = PagedAttend(AttnMetadata.of([rows], [rows], [[1, 2, 3]]), kv, [layer.window for layer in head.kv_layers])
    h = head(tokens[:rows], head.fuse(captured), attend.attn.positions(rows), attend, 0)[-1:]
    outputs = [h[0]]
    for j in range(1, K):
        attend = attend.at(attend.attn.advance())
        h = head(tokens[rows - 1 + j][None], h, attend.attn.positions(1), attend, j)
        outputs.append(h[0])
    return outputs


@torch.no_grad()
def modules_in_a_row(head: DraftHead, captured: Tensor, tokens: Tensor) -> list[Tensor]:
    """Run K modules (arXiv 2412.19437): module j runs over all rows 0..p, on what module j - 1 returned for them."""
    rows = len(captured)
    kv = allocate_layers(head.kv_layers, num_blocks=4, block_size=16, dtype=torch.float32)
    attend = PagedAttend(AttnMetadata.of([rows], [rows], [[1, 2, 3]]), kv, [layer.window for layer in head.kv_layers])
    h, outputs = captured, []
    for j in range(K):
        h = head(tokens[j : j + rows], h, attend.attn.positions(rows), attend, j)
        outputs.append(h[-1])
    return outputs


@pytest.mark.parametrize("name", KINDS)
def test_unrolled_training_is_inference(folder: Path, make: Make, name: str) -> None:
    kind = KINDS[name]
    options = make(kind.options, **kind.fields)
    config = ModelConfig.from_folder(folder)
    target = load_decoder(config, torch.float32)
    head = new_head(options, target)
    given = training_batch(target, options.layers_read(config, None))
    following, captured = given.inputs.roll(-1, dims=1), given.captured
    passes = passes_of(head, given, options.moving)
    head.eval()
    moved = 0.0
    for b in range(BATCH):
        for p in range(SEQ - K):
            run = chain if options.moving else modules_in_a_row
            expected = run(head, captured[b, : p + 1], following[b])
            for j, y in enumerate(expected):
                scale = max(1.0, float(y.abs().max()))
                torch.testing.assert_close(
                    passes[j][0][b, p], y, atol=2e-5 * scale, rtol=0, msg=f"row {p}, pass {j}, up to {scale}"
                )
                logits = head.logits(y[None], j)[0]
                torch.testing.assert_close(passes[j][1][b, p], logits, atol=2e-4 * scale, rtol=0)
            moved = max(moved, float((passes[1][1][b, p] - passes[0][1][b, p]).abs().max()))
    assert moved > 0.1


def test_what_kinds_read_of_the_target(folder: Path, make: Make) -> None:
    config = ModelConfig.from_folder(folder)
    for name, kind in KINDS.items():
        expected = (LAYERS - 1,) if name.startswith("mtp") else LAST_STATE
        assert make(kind.options, **kind.fields).layers_read(config, (0,)) == expected


def test_eagle_loss_is_that_of_the_paper(folder: Path, make: Make) -> None:
    """With one pass, the loss is smooth L1 to the next feature, plus a tenth of a cross-entropy.

    The cross-entropy is with the target's distribution.
    """
    options, target = make(EagleOptions, unroll=1), load_decoder(ModelConfig.from_folder(folder), torch.float32)
    head = new_head(options, target)
    given = training_batch(target, ())
    following, last = given.inputs.roll(-1, dims=1), given.last
    loss = HeadLoss(head, target, 1, torch.float32, options.objective, LAST_STATE)
    found = loss(*given)
    features, text = 0.0, 0.0
    for b in range(BATCH):
        for p in range(SEQ - 1):
            y = chain(head.eval(), last[b, : p + 1], torch.cat((following[b], following[b])))[0]
            gap = (y - last[b, p + 1]).abs()
            features += float(torch.where(gap < 1, gap * gap / 2, gap - 0.5).mean())
            wanted = target.logits(last[b, p + 1][None]).softmax(-1)
            text += float(F.cross_entropy(head.logits(y[None]), wanted))
    rows = BATCH * (SEQ - 1)
    assert float(found.detach()) == pytest.approx(features / rows + 0.1 * text / rows, rel=1e-4)


@pytest.mark.parametrize("kind", [EagleOptions, MtpOptions])
def test_the_first_draft_alone_is_taught_at_first(folder: Path, make: Make, kind: type[HeadOptions]) -> None:
    options, config = make(kind, single_pass=0.5, dtype="float32"), ModelConfig.from_folder(folder)
    target = load_decoder(config, torch.float32)
    head, capture = new_head(options, target), options.layers_read(config, None)
    given, found = training_batch(target, capture), []
    loss = options.loss(head, target, capture)
    for progress in (0.0, 0.49, 0.5, 0.9):
        loss.begin(progress)
        found.append(float(loss(*given).detach()))
    one, all_of_them = (
        float(HeadLoss(head, target, n, torch.float32, options.objective, capture)(*given).detach()) for n in (1, K)
    )
    assert found == [one, one, all_of_them, all_of_them]
    assert one != all_of_them


@pytest.mark.parametrize("name", KINDS)
def test_a_quantised_target(folder: Path, make: Make, name: str) -> None:
    """The linears and the lm_head are quantised.

    Kinds that learn through the lm_head are refused, and the rest learns.
    """
    kind = KINDS[name]
    options, config = make(kind.options, **kind.fields), ModelConfig.from_folder(folder)
    target = load_decoder(config, torch.float32)
    capture = options.layers_read(config, None)
    for module in target.modules():
        if isinstance(module, Linear):
            module.pack("int8")
    if name.startswith(("eagle", "mtp")):
        with pytest.raises(UnsupportedError, match="the target's lm_head is quantised"):
            new_head(options, target)
        return
    head = new_head(options, target)
    loss = HeadLoss(head, target, K, torch.float32, options.objective, capture, options.moving)
    loss(*training_batch(target, capture)).backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_heads_learn_in_bfloat16(folder: Path, make: Make, name: str) -> None:
    """A head in fp32 trains with bfloat16 arithmetic, and its loss is close to that of fp32."""
    kind = KINDS[name]
    options, config = make(kind.options, **kind.fields), ModelConfig.from_folder(folder)
    target = load_decoder(config, torch.float32)
    head, capture = new_head(options, target), options.layers_read(config, None)
    batch, losses = training_batch(target, capture), []
    for dtype in (torch.float32, torch.bfloat16):
        loss = HeadLoss(head, target, K, dtype, options.objective, capture, options.moving)
        losses.append(loss(*batch))
    losses[1].backward()
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=0.1)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_all_of_the_head_and_nothing_else(folder: Path, make: Make, name: str) -> None:
    kind = KINDS[name]
    options, config = make(kind.options, **kind.fields), ModelConfig.from_folder(folder)
    target = load_decoder(config, torch.float32)
    head, capture = new_head(options, target), options.layers_read(config, None)
    loss = HeadLoss(head, target, K, torch.float32, options.objective, capture, options.moving)
    loss(*training_batch(target, capture)).backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    shared = {id(parameter) for parameter in target.parameters()}
    own = {name: p.grad for name, p in head.named_parameters() if id(p) not in shared}
    assert own
    assert all(grad is not None and grad.abs().max() > 0 for grad in own.values()), own.keys()


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_what_was_trained(folder: Path, make: Make, name: str) -> None:
    """Heads are written in bf16, except MTP modules, which are written as the target's weights are."""
    kind = KINDS[name]
    options, config = make(kind.options, **kind.fields), ModelConfig.from_folder(folder)
    target = load_decoder(config, torch.float32)
    head, capture = new_head(options, target), options.layers_read(config, None)
    options.export(head, config, capture)
    loaded = kind.load(config, target, options.out)
    if not isinstance(options, MtpOptions):
        shared = {id(parameter) for parameter in target.parameters()}
        for parameter in head.parameters():
            if id(parameter) not in shared:
                parameter.data = parameter.data.bfloat16().float()
    given = training_batch(target, capture)
    ours, theirs = (
        torch.stack([logits for _, logits in passes_of(one, given, options.moving)]) for one in (head, loaded)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert options.out.joinpath("model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mimo"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_with_mtp_modules_says_what_its_target_says(
    tmp_path: Path, make: Make, arch: str, tied: bool
) -> None:
    """The outputs are equal to the bit.

    transformers reads the checkpoint's weights as Qwen2's, and its config.json by the class next to it.
    """
    source = make_checkpoint(tmp_path, arch, dtype="bfloat16", name="source", **{**TARGET, "tie_word_embeddings": tied})
    (source / "tokenizer.json").write_text("{}")
    options, config = make(MtpOptions, target=source), ModelConfig.from_folder(source)
    options.check_target(config)
    options.export(new_head(options, load_decoder(config, torch.float32)), config, (LAYERS - 1,))
    before, after = (load_decoder(ModelConfig.from_folder(one), torch.float32) for one in (source, options.out))
    ids = training_batch(before, ())[0]
    outputs = [one.train().logits(observe(one, (), ids)[1].flatten(0, 1)) for one in (before, after)]
    assert torch.equal(*outputs)
    with torch.no_grad():
        theirs = oracle(options.out)(ids, use_cache=False).logits
    torch.testing.assert_close(theirs.flatten(0, 1), outputs[0], atol=1e-4, rtol=1e-4)
    read = transformers.AutoConfig.from_pretrained(options.out, trust_remote_code=True)
    assert (read.model_type, read.num_nextn_predict_layers, read.num_hidden_layers) == ("mimo", 1, LAYERS)
    assert sorted(file.name for file in options.out.iterdir()) == [
        "config.json", "configuration_mimo.py", "generation_config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("qwen3", {}, "norms of queries and keys"),
        ("mistral_swa", {}, "sliding windows"),
        ("llama", {"attention_bias": True}, "biases of its output projections"),
        ("llama", {"mlp_bias": True}, "biases of its output projections or MLPs"),
        ("llama", {"head_dim": 8}, "heads of another size"),
    ],
)
def test_targets_that_mimos_layout_cannot_hold(
    tmp_path: Path, make: Make, arch: str, fields: dict[str, Any], message: str
) -> None:
    config = ModelConfig.from_folder(make_checkpoint(tmp_path, arch, **TARGET, **fields))
    with pytest.raises(UnsupportedError, match=message):
        make(MtpOptions).check_target(config)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (EagleOptions, {"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
        (MedusaOptions, {"num_layers": 0}, "num_layers=0 must be at least 1"),
        (MLPSpeculatorOptions, {"inner_size": -1}, "inner_size=-1 must be at least 1"),
        (MLPSpeculatorOptions, {"tie_weights": True, "unroll": 1}, "one stage shares nothing"),
        (MtpOptions, {"modules": 2}, "modules=2 with unroll=3: use 1, for all drafts, or unroll"),
        (MtpOptions, {"modules": 0}, "modules=0 with unroll=3"),
        (MtpOptions, {"steps": None}, "give exactly one of them"),
        (EagleOptions, {"single_pass": 1.0}, "single_pass=1.0 must be a share of the run, from 0 to less than 1"),
        (MedusaOptions, {"single_pass": 0.5}, "not all drafts of kind 'medusa' come from one head"),
        (MtpOptions, {"modules": K, "single_pass": 0.5}, "not all drafts of kind 'mtp' come from one head"),
    ],
)
def test_options_are_checked(make: Make, kind: type[HeadOptions], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, **fields)


def test_the_target_is_not_overwritten(folder: Path, make: Make) -> None:
    with pytest.raises(ConfigError, match="is the target's folder"):
        make(MtpOptions, out=folder / ".." / folder.name)
