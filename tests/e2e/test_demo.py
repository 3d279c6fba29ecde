"""The shipped demo models are what MODEL_CARD.md says: other engines load them, and the draft is a good guesser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from trtspec import LLM, SamplingParams
from trtspec.train.data import standard_library

DEMO = Path(__file__).parents[2] / "examples" / "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def held_out_prompts(count: int, characters: int) -> list[str]:
    """The starts of files that the demo models have not seen."""
    texts = [file.text for file in standard_library() if file.held_out and len(file.text) > 4 * characters]
    return [text[:characters] for text in texts[:: len(texts) // count][:count]]


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_loads_it_and_continues_alike(name: str) -> None:
    """fp32, so that the comparison is of the models and not of two bf16 roundings."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / name)
    prompt = held_out_prompts(1, 300)[0]
    ids = tokenizer(prompt)["input_ids"]
    with LLM(DEMO / name, dtype="float32") as llm:
        output = llm.generate(prompt, GREEDY)[0]
    assert list(output.prompt_token_ids) == ids
    expected = theirs.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=None,
    )
    assert list(output.outputs[0].token_ids) == expected[0, len(ids) :].tolist()
    assert output.outputs[0].text == tokenizer.decode(expected[0, len(ids) :], skip_special_tokens=True)


def test_draft_agrees_with_target_on_held_out_files() -> None:
    """Greedy, K = 3: at least 2.3 tokens a step, and exactly plain decoding's tokens."""
    prompts = held_out_prompts(12, 300)
    draft = {"method": "draft_model", "model": str(DEMO / "draft"), "num_speculative_tokens": 3}
    with LLM(DEMO / "target", max_batch_size=12) as plain, LLM(DEMO / "target", draft, max_batch_size=12) as drafted:
        expected = plain.generate(prompts, GREEDY)
        outputs = drafted.generate(prompts, GREEDY)
        acceptance_length = drafted.get_metrics().speculation.acceptance_length
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert acceptance_length >= 2.3


def test_together_under_20_megabytes() -> None:
    assert sum(file.stat().st_size for name in ("target", "draft") for file in (DEMO / name).iterdir()) < 20e6


def test_the_demo_runs_and_finds_every_mode_lossless() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--max-tokens", "8"],
        cwd=DEMO.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 3  # plain, n-gram and draft model equal plain
