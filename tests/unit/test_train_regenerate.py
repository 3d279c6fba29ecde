"""The target's own words by its engine are those of plain greedy decoding, and nothing is generated twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import processors

from tests.checkpoints import make_checkpoint
from tests.e2e.tiny import EOS, add_tokenizer
from trtspec import LLM
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.models.weights import load_decoder
from trtspec.train import run_data
from trtspec.train.generate import continue_windows
from trtspec.train.regenerate import Manner, Speaker, forget


class Killed(Exception):
    pass


def test_words_are_greedy_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed after the second piece of three goes on with the third.

    Other prompts or params are generated anew.
    """
    monkeypatch.setattr("trtspec.train.regenerate._PIECE", 2)
    model = make_checkpoint(tmp_path, "llama")
    prompts = torch.randint(3, 199, (5, 8), generator=torch.Generator().manual_seed(0))
    expected = continue_windows(load_decoder(ModelConfig.from_folder(model), torch.float32).train(), prompts, 12)
    asked: list[int] = []
    generate = LLM.generate

    def watched(self: LLM, some: list[list[int]], *arguments: object, **options: object) -> object:
        if len(asked) == 2:
            asked.append(0)
            raise Killed
        asked.append(len(some))
        return generate(self, some, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "generate", watched)
    params = [Manner(ignore_eos=True).params(12, i) for i in range(5)]
    with pytest.raises(Killed), Speaker(model, tmp_path / "pieces", 20) as speaker:
        speaker.say("texts", prompts.tolist(), params)
    with Speaker(model, tmp_path / "pieces", 20) as speaker:
        words = speaker.say("texts", prompts.tolist(), params)
    assert asked == [2, 2, 0, 1]
    said = [token for prompt, one in zip(prompts.tolist(), words, strict=True) for token in (*prompt, *one.ids)]
    assert said == expected.tolist()
    assert not any(one.ended for one in words)
    with Speaker(model, tmp_path / "pieces", 20) as speaker:
        assert speaker.say("again", prompts.tolist(), params) == words
        assert len(asked) == 4
        shorter = speaker.say("again", prompts.tolist(), [Manner(ignore_eos=True).params(5, i) for i in range(5)])
    assert [one.ids for one in shorter] == [one.ids[:5] for one in words]
    assert len(asked) == 7
    forget(tmp_path / "pieces")
    assert not (tmp_path / "pieces").exists()


@pytest.mark.parametrize("bos", [True, False])
def test_prompts_cut_from_text_begin_as_the_engine_s_do(tmp_path: Path, bos: bool) -> None:
    add_tokenizer(tmp_path)
    if bos:
        backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
        backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("abcd" * 40)
    options = SimpleNamespace(held_out=tmp_path / "text", target=tmp_path)
    prompts = run_data._cut_prompts(options, 200)  # type: ignore[arg-type]
    assert {len(prompt) for prompt in prompts} == {run_data.PROMPT_LEN}
    assert all((prompt[0] == EOS) == bos and EOS not in prompt[1:] for prompt in prompts)
