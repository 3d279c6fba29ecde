"""The shipped demo models are as MODEL_CARD.md says: other engines load them, and their drafts are good guesses."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from examples.demo import __main__ as demo
from examples.demo import engines
from trtspec import LLM, SamplingParams
from trtspec.train.data import standard_library

DEMO = Path(__file__).parents[2] / "examples" / "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def held_out_prompts(count: int, characters: int) -> list[str]:
    """The starts of files that the demo models were not trained on; fewer where the standard library has fewer."""
    texts = [file.text for file in standard_library() if file.held_out and len(file.text) > 4 * characters]
    return [text[:characters] for text in texts[:: max(len(texts) // count, 1)][:count]]


MIXED = [
    (prompt, GREEDY if i % 2 else SamplingParams(temperature=0.7, top_p=0.95, seed=i, max_tokens=48, ignore_eos=True))
    for i, prompt in enumerate(held_out_prompts(8, 150))
]


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_loads_it_and_continues_alike(name: str) -> None:
    """transformers loads the model and continues a prompt with the same ids.

    Both compute in fp32, so the comparison is of the models and not of two bf16 roundings.
    """
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


PROMPTS = held_out_prompts(24, 200)


@pytest.fixture(scope="module")
def greedy_outputs() -> list[tuple[int, ...]]:
    with LLM(DEMO / "target", max_batch_size=12) as plain:
        return [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]


# measured: 3.16, 2.41, 3.01, 1.84, 3.16
@pytest.mark.parametrize(
    ("method", "folder", "least"),
    [
        ("eagle3", "eagle3", 2.9),
        pytest.param("draft_model", "draft", 2.2, marks=pytest.mark.long),
        pytest.param("eagle", "eagle", 2.75, marks=pytest.mark.long),
        pytest.param("medusa", "medusa", 1.65, marks=pytest.mark.long),
        pytest.param("mtp", "mtp", 2.9, marks=pytest.mark.long),
    ],
)
def test_drafts_agree_with_the_target_on_held_out_files(
    greedy_outputs: list[tuple[int, ...]], method: str, folder: str, least: float
) -> None:
    """The acceptance length is at least `least`, greedy, at K = 3. The ids are exactly those of plain decoding."""
    target, model = (DEMO / folder, {}) if method == "mtp" else (DEMO / "target", {"model": str(DEMO / folder)})
    with LLM(target, {"method": method, "num_speculative_tokens": 3, **model}, max_batch_size=12) as drafted:
        outputs = drafted.generate(PROMPTS, GREEDY)
        acceptance_length = drafted.get_metrics().speculation.acceptance_length
    print(f"{method}: {acceptance_length:.2f}")
    assert [output.outputs[0].token_ids for output in outputs] == greedy_outputs
    assert acceptance_length >= least


@pytest.fixture(scope="module")
def plain_outputs() -> dict[str, list[tuple[int, ...]]]:
    """dtype -> the ids of plain decoding for each of MIXED, alone in its batch."""
    outputs = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(DEMO / "target", dtype=dtype, max_batch_size=1) as llm:
            results = [llm.generate(prompt, params)[0] for prompt, params in MIXED]
        outputs[dtype] = [tuple(result.outputs[0].token_ids) for result in results]
    return outputs


@pytest.mark.parametrize(
    ("k", "dtype"),
    [
        (3, "float32"),
        (7, "bfloat16"),
        *(pytest.param(k, "float32", marks=pytest.mark.long) for k in (1, 2, 5, 7)),
        *(pytest.param(k, "bfloat16", marks=pytest.mark.long) for k in (1, 2, 3, 5)),
    ],
)
def test_the_trained_head_loses_nothing(plain_outputs: dict[str, list[tuple[int, ...]]], k: int, dtype: str) -> None:
    """The trained head changes no output at any K.

    Greedy and seeded requests run together, prompts come in chunks, and there are too few blocks for all. Every
    position keeps some drafts.
    """
    config = {"method": "eagle3", "model": str(DEMO / "eagle3"), "num_speculative_tokens": k}
    options = {"dtype": dtype, "max_batch_size": 6, "max_num_tokens": 6 * (k + 1), "num_kv_blocks": 24}
    with LLM(DEMO / "target", config, **options) as llm:
        results = llm.generate([prompt for prompt, _ in MIXED], [params for _, params in MIXED])
        stats = llm.get_metrics()
    assert [tuple(result.outputs[0].token_ids) for result in results] == plain_outputs[dtype]
    assert all(0 < share < 1 for share in stats.speculation.acceptance_per_position)
    assert stats.preemptions > 0


@pytest.mark.parametrize(
    ("folders", "megabytes"), [(("target", "draft"), 20), (("eagle3", "eagle"), 10), (("medusa",), 12), (("mtp",), 20)]
)
def test_small_enough_to_ship(folders: tuple[str, ...], megabytes: int) -> None:
    assert sum(file.stat().st_size for name in folders for file in (DEMO / name).iterdir()) < 1e6 * megabytes


def demo_arguments(temperature: str, backend: str, modes: list[str]) -> list[str]:
    return ["--tiny", "--max-tokens", "8", "--temperature", temperature, "--backend", backend, "--modes", *modes]


@pytest.mark.parametrize(
    ("temperature", "modes"),
    [("0.8", ["ngram", "draft", "eagle3"]), pytest.param("0", ["ngram", "eagle3"], marks=pytest.mark.long)],
)
def test_the_demo_runs_and_finds_every_mode_lossless(
    temperature: str, modes: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", *demo_arguments(temperature, "eager", modes)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("examples.demo", run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert said.count("yes") == 1 + len(modes)  # plain decoding and each mode equal plain decoding


@pytest.mark.parametrize(
    ("kernels", "engine"),
    [
        ({"cpu": "avx512_bf16"}, "assistant-tree"),
        ({"cpu": "amx"}, "assistant-tree"),
        ({"cpu": "avx512_vnni"}, "assistant-eagle3"),
        ({"cpu": "avx2"}, "assistant-eagle3"),
        ({}, "assistant-eagle3"),
    ],
)
def test_the_assistant_has_a_tree_where_the_cpu_multiplies_bf16(
    kernels: dict[str, str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "model_folder", lambda: None)
    monkeypatch.setattr(demo, "load_plugins", lambda: kernels)
    assert demo._assistant(Console(quiet=True)).modes["eagle3"][1] == engine


@pytest.mark.long
@pytest.mark.parametrize(
    ("temperature", "modes"),
    [("0", ["ngram", "draft", "eagle3"]), ("0.8", ["ngram", "draft", "medusa", "mtp", "eagle3"])],
)
def test_the_demo_compiles_engines_that_lose_nothing(temperature: str, modes: list[str]) -> None:
    """The demo runs in a process of its own, which starts those that compile."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", *demo_arguments(temperature, "aoti", modes)],
        cwd=DEMO.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 1 + len(modes)


@pytest.mark.long
def test_engines_can_be_used_as_soon_as_each_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "FOLDER", tmp_path)
    outdated, other = tmp_path / "plain-0123456789ab", tmp_path / "plain-eagle3-0123456789ab"
    outdated.mkdir()
    other.mkdir()
    names, console = ["medusa", "plain"], Console(quiet=True)
    first = list(engines.built(names, console))
    assert sorted(name for name, _, _ in first) == names
    assert [missing for _, _, missing in first] in ([1, 0], [0, 0])  # both may be done at once
    assert {other, *(folder for _, folder, _ in first)} == set(tmp_path.iterdir()), "the outdated one is deleted"
    again = list(engines.built(names, console))
    assert again == [(name, engines.folder_of(name), 0) for name in names]
    assert sorted(again) == sorted((name, folder, 0) for name, folder, _ in first)
