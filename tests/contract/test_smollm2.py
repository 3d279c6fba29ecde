"""A pretrained model from a GGUF file: its text is that of transformers, and the same in every mode.

`make contract-smollm2` sets TRTSPEC_SMOLLM2 to the file; without it all tests are skipped.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.dspark_checkpoints import make_dspark
from tests.e2e.tiny import LyingOracle
from tests.head_checkpoints import make_dflash, make_eagle, make_eagle3, make_medusa, make_mlp_speculator
from trtspec import LLM, RequestOutput, SamplingParams
from trtspec.build.convert import convert
from trtspec.cli import main
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.interop.decoding_configs import SaveHiddenStatesDecodingConfig
from trtspec.methods.hidden_states.shards import ShardReader, shards_of

FILE = os.environ.get("TRTSPEC_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not FILE, reason="needs a model that `make contract-smollm2` downloads")

LENGTH = 128
SUBJECTS = (
    "the sea", "a bicycle", "photosynthesis", "the number seven", "an honest thief", "rust on iron", "Paris", "a queue",
    "gravity", "bread",
)  # fmt: skip
TASKS = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "Write a Python function whose name has to do with {}.",
    "Translate a sentence about {} into French.",
)
PROMPTS = [task.format(subject) for task in TASKS for subject in SUBJECTS]
NEAR = 1e-3  # logits: two fp32 programs may differ by so much, so a smaller gap decides nothing


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "cache"


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep engines from one test to the next."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(cache))


@contextmanager
def running(**options: Any) -> Iterator[LLM]:
    llm = LLM(FILE, max_seq_len=512, max_num_tokens=1024, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def chats(prompts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(FILE, tmp_path_factory.mktemp("smollm2") / "hf", "float32")


@pytest.mark.parametrize("backend", ["eager", "aoti"])
def test_greedy_text_is_that_of_transformers(folder: Path, backend: str) -> None:
    """In 50 chats of 128 tokens in fp32, transformers ranks each id first after those before it, or nearly so."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with running(dtype="float32", backend=backend, max_batch_size=10) as llm:
        outputs = llm.chat(chats(PROMPTS), SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True), False)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert oracle.dtype == torch.float32
    near = 0
    for prompt, output, ours in zip(PROMPTS, outputs, ids_of(outputs), strict=True):
        (chat,) = chats([prompt])
        before = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        assert list(output.prompt_token_ids) == before
        assert len(ours) == LENGTH
        with torch.no_grad():
            logits = oracle(torch.tensor([before + ours[:-1]])).logits[0, len(before) - 1 :]
        chosen, best = logits.gather(1, torch.tensor(ours)[:, None])[:, 0], logits.max(1).values
        assert bool((best - chosen < NEAR).all()), prompt
        near += int((best > chosen).sum())
    print(f"\n{len(PROMPTS)} chats: {near} ids of {len(PROMPTS) * LENGTH} were second by less than {NEAR}")
    assert near < 5


@pytest.mark.parametrize("backend", ["eager", "aoti"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_mode_changes_the_text(tmp_path: Path, dtype: str, backend: str) -> None:
    """No mode changes greedy or sampled text, in batches of 3 and 16; a draft that is the target is accepted."""
    head = make_eagle3(tmp_path, ModelConfig.from_folder(FILE).path)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=48, ignore_eos=True) for t in (0.0, 0.8)]
    prompts = PROMPTS[::3][:16]

    def generate(speculation: Any, batch: int) -> tuple[list[list[int]], float]:
        with running(speculative_config=speculation, dtype=dtype, backend=backend, max_batch_size=batch) as llm:
            outputs = [output for one in params for output in llm.chat(chats(prompts), one, False)]
        lengths = [output.acceptance_length for output in outputs if not math.isnan(output.acceptance_length)]
        return ids_of(outputs), sum(lengths) / max(len(lengths), 1)

    plain, _ = generate(None, 3)
    for speculation, least in (
        ({"method": "ngram", "num_speculative_tokens": 4}, 1.2),
        ({"method": "suffix", "num_speculative_tokens": 4}, 1.2),
        ({"method": "draft_model", "model": FILE, "num_speculative_tokens": 3}, 47 / 12),  # 4 but for the text's end
        ({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}, 1.0),
    ):
        for batch in (3, 16):
            ids, length = generate(speculation, batch)
            assert ids == plain, (speculation, batch)
            assert length >= least - 1e-6, (speculation, batch, length)


# -- modes whose drafts are heads: random ones, or of one step of training ---------------------------------------------

CAPTURE = (2, 14, 26)
MASK = 0  # <|endoftext|>


class Heads:
    """Draft checkpoints for the model; each is made when it is first requested."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.get = functools.cache(self._get)

    def _get(self, name: str) -> Path:
        make: dict[str, Callable[[], Path]] = {
            "eagle3": lambda: make_eagle3(self.root, self.folder, CAPTURE),
            "p_eagle": lambda: make_eagle3(self.root, self.folder, CAPTURE, name="p_eagle", num_layers=2, mask=MASK),
            "eagle": lambda: make_eagle(self.root, self.folder),
            "medusa": lambda: make_medusa(self.root, self.folder, num_heads=3),
            "mlp_speculator": lambda: make_mlp_speculator(self.root, self.folder, n_predict=3),
            "dflash": lambda: make_dflash(self.root, self.folder, CAPTURE, MASK),
            "dspark": lambda: make_dspark(self.root, self.folder, CAPTURE, MASK),
            "pard": self._pard,
            "mtp": lambda: self._mtp(1),
            "mtp of 3": lambda: self._mtp(3),
        }
        return make[name]()

    def _pard(self) -> Path:
        """Make the model a draft that guesses at mask tokens, which it never learnt."""
        made = Path(shutil.copytree(self.folder, self.root / "pard"))
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, "pard_token": MASK}))
        return made

    def _mtp(self, modules: int) -> Path:
        """Make the model with MTP modules of one step of training, as `trtspec train mtp` writes them."""
        ids, out = self.root / "ids.npy", self.root / f"mtp-{modules}"
        np.save(ids, np.random.default_rng(0).integers(0, 1000, 600).astype(np.uint16))
        command = ["train", "mtp", "--target", FILE, "--data", str(ids), "--out", str(out), "--steps", "1"]
        options = ["--unroll", "3", "--modules", str(modules), "--regenerate", "0", "--seq-len", "64"]
        assert main([*command, *options, "--batch-size", "2", "--dtype", "float32"]) == 0
        return out


HEADED: dict[str, tuple[dict[str, Any], str]] = {
    "MTP": ({"method": "mtp", "vanilla": True}, "mtp of 3"),
    "MTP_EAGLE": ({"method": "mtp", "one_engine": False}, "mtp"),
    "MTP_EAGLE_ONE_MODEL": ({"method": "mtp"}, "mtp"),
    "EAGLE3": ({"method": "eagle3", "one_engine": False}, "eagle3"),
    "EAGLE": ({"method": "eagle", "one_engine": False}, "eagle"),
    "EAGLE_ONE_MODEL": ({"method": "eagle"}, "eagle"),
    "MEDUSA": ({"method": "medusa"}, "medusa"),
    "MLP_SPECULATOR": ({"method": "mlp_speculator"}, "mlp_speculator"),
    "DRAFT_TARGET_ONE_MODEL": ({"method": "draft_model", "one_engine": True}, ""),
    "PARD": ({"method": "draft_model", "parallel_drafting": True}, "pard"),
    "P_EAGLE": ({"method": "eagle3", "parallel_drafting": True}, "p_eagle"),
    "DFLASH": ({"method": "dflash"}, "dflash"),
    "DSPARK": ({"method": "dspark"}, "dspark"),
}
"""Modes of SpeculativeDecodingMode that test_no_mode_changes_the_text does not run.

Each has fields of speculative_config, and the name of its head ("" = the model itself). The two modes without a
checkpoint have their own test.
"""


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"), folder)


def generate(model: str, dtype: str, backend: str, speculation: Any) -> tuple[list[RequestOutput], int]:
    """Generate four chats at once, greedy and then sampled -> outputs, number of drafted tokens."""
    params = [SamplingParams(temperature=t, seed=7, max_tokens=32, ignore_eos=True) for t in (0.0, 0.8)]
    options = {"dtype": dtype, "backend": backend, "max_batch_size": 4, "max_seq_len": 256, "max_num_tokens": 512}
    with LLM(model, speculation, **options) as llm:
        outputs = [output for one in params for output in llm.chat(chats(PROMPTS[::13]), one, False)]
        return outputs, llm.get_metrics().speculation.num_draft_tokens


@functools.cache
def plain(dtype: str, backend: str) -> list[RequestOutput]:
    return generate(FILE, dtype, backend, None)[0]


@pytest.mark.parametrize("backend", ["eager", "aoti"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", HEADED)
def test_no_head_changes_the_text(heads: Heads, mode: str, dtype: str, backend: str) -> None:
    fields, name = HEADED[mode]
    model = str(heads.get(name)) if name.startswith("mtp") else FILE
    draft = {} if name.startswith("mtp") else {"model": str(heads.get(name)) if name else FILE}
    outputs, drafted = generate(model, dtype, backend, {**fields, **draft, "num_speculative_tokens": 3})
    assert ids_of(outputs) == ids_of(plain(dtype, backend))
    assert drafted > 100


@pytest.mark.parametrize("backend", ["eager", "aoti"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nor_do_a_drafter_of_the_user_and_saved_states(tmp_path: Path, dtype: str, backend: str) -> None:
    """A user's drafter and saved hidden states do not change the text.

    The drafter knows the text, and lies about three tokens of ten.
    """
    known = plain(dtype, backend)
    answers = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in known]
    oracle = {"method": "custom_class", "drafter": LyingOracle(answers), "num_speculative_tokens": 3}
    outputs, drafted = generate(FILE, dtype, backend, oracle)
    assert ids_of(outputs) == ids_of(known)
    assert drafted > 100
    config = SaveHiddenStatesDecodingConfig(output_directory=str(tmp_path), eagle3_layers_to_capture=list(CAPTURE))
    outputs, drafted = generate(FILE, dtype, backend, config)
    assert ids_of(outputs) == ids_of(known)
    assert drafted == 0
    saved = [ShardReader(path) for path in shards_of(tmp_path)]
    assert sum(sum(reader.lengths) for reader in saved) == sum(len(answer) - 1 for answer in answers)
