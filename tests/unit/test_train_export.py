"""Exports of training: a folder that others load, and figures that mean what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trtspec.config.checkpoint.model import ModelConfig
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.weights import load_decoder
from trtspec.train.card import CardContents, ModelSummary, model_card
from trtspec.train.data import train_tokenizer
from trtspec.train.evaluate import Acceptance, greedy_acceptance, held_out_prompts, perplexity
from trtspec.train.export import export
from trtspec.train.generate import continue_windows, greedy
from trtspec.train.language_model import LanguageModel, initialise, llama_spec

pytestmark = pytest.mark.slow

VOCAB = 300
TEXT = "def f(x):\n    return x + 1\n"


def tiny_decoder(seed: int, layers: int = 3, vocab_size: int = VOCAB) -> Decoder:
    """A decoder with random weights several times the usual size, so that arg-maxes differ clearly."""
    decoder = initialise(
        Decoder(llama_spec(vocab_size, layers, hidden_size=64, intermediate_size=96, head_dim=16)), seed
    )
    for parameter in decoder.parameters():
        parameter.data.mul_(8.0 if parameter.ndim == 2 else 1.0)
    return decoder.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([TEXT], VOCAB).save(str(path))
    return path


def logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return LanguageModel(decoder).eval()(ids).view(*ids.shape, -1)


def test_transformers_loads_it_unchanged_and_agrees(tmp_path: Path, tokenizer_file: Path) -> None:
    transformers = pytest.importorskip("transformers")
    decoder = tiny_decoder(0)
    export(decoder, tokenizer_file, tmp_path / "model", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 0
    ids = torch.randint(VOCAB, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (theirs(ids).logits - logits(decoder, ids)).abs().max() < 1e-4


def test_we_load_it_and_a_second_export_replaces_the_first(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = tmp_path / "model"
    export(tiny_decoder(0), tokenizer_file, folder)
    decoder = tiny_decoder(1)
    export(decoder, tokenizer_file, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no staging folder is left
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    ours = load_decoder(ModelConfig.from_folder(folder), torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(dict(ours.named_parameters())[name], parameter.to(torch.bfloat16)), name


def test_export_without_a_tokenizer_is_an_error_and_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        export(tiny_decoder(0), tmp_path / "tokenizer.json", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_cached_continuation_equals_reading_everything_again() -> None:
    decoder = tiny_decoder(0)
    prompts = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    text = prompts
    for _ in range(12):
        text = torch.cat([text, logits(decoder, text)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(greedy(decoder, prompts, 12), text)
    assert continue_windows(decoder, prompts, 12, batch=2).tolist() == text.reshape(-1).tolist()


def test_acceptance_equals_drafting_and_checking_step_by_step() -> None:
    target = tiny_decoder(0, vocab_size=12)
    draft = tiny_decoder(0, vocab_size=12)
    generator = torch.Generator().manual_seed(2)
    for parameter in draft.parameters():  # a blurred target, so that it is right now and then
        parameter.data += 0.3 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    prompts = torch.randint(12, (6, 5), generator=generator)
    new, K = 24, 3
    counts = []
    for prompt in prompts:
        text = greedy(target, prompt[None], new)[0]
        done = len(prompt) + 1
        while done + K < len(text):
            guesses = greedy(draft, text[None, :done], K)[0, done:]
            kept = 0
            while kept < K and guesses[kept] == text[done + kept]:
                kept += 1
            counts.append(kept)
            done += kept + 1
    found = greedy_acceptance(target, draft, prompts, new, K)
    assert found.steps == len(counts)
    assert found.length == pytest.approx(np.mean(counts) + 1)
    assert found.per_position == pytest.approx([np.mean([kept > j for kept in counts]) for j in range(K)])
    assert 0 < found.per_position[2] < found.per_position[0] < 1


def test_a_draft_that_is_the_target_is_always_right() -> None:
    decoder = tiny_decoder(0)
    prompts = held_out_prompts((np.arange(600) % VOCAB).astype(np.uint16), 4, 8)
    assert greedy_acceptance(decoder, decoder, prompts, 20).length == 4.0
    with pytest.raises(ConfigError, match="too short"):
        greedy_acceptance(decoder, decoder, prompts, 3)


def test_perplexity_of_ignorance_is_the_vocabulary() -> None:
    decoder = tiny_decoder(0)
    decoder.embedding.weight.data.zero_()
    tokens = (np.arange(600) % VOCAB).astype(np.uint16)
    assert perplexity(decoder, tokens, seq_len=50, max_tokens=500) == pytest.approx(VOCAB, rel=1e-4)
    with pytest.raises(ConfigError, match="use more data"):
        perplexity(decoder, tokens, seq_len=700, max_tokens=10_000)


def test_card_states_what_was_measured() -> None:
    model = ModelSummary(8, 256, 7_345_408, 14.7, 1234, 5_000_000, 56.0, 3.21, {512: 25.4, 2048: 24.1})
    counts = {f"{p}_{unit}": 7 for p in ("train", "held_out") for unit in ("files", "characters", "tokens")}
    data: dict[str, int | str] = {"python": "3.11", "vocab_size": 4096, **counts}
    card = model_card(
        CardContents(
            data, model, model, Acceptance(2.5, (0.7, 0.5, 0.3), 99), (40, 64, 128), "python train.py", "2", "final"
        )
    )
    for expected in (
        "7,345,408",
        "1,234",
        "25.40",
        "24.10",
        "**Acceptance length 2.50**",
        "70.0%, 50.0%, 30.0%",
        "PSF",
    ):
        assert expected in card
