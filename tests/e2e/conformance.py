"""One conformance suite for all backends of engine folders.

It runs the same requests in every mode, packed in a small cache and one at a time. Ids, text, reasons and accepted
drafts are compared with plain decoding on the same backend and with eager.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.e2e.tiny import (
    Outcome,
    Run,
    add_tokenizer,
    assert_all_blocks_free,
    draw_cases,
    make_target,
    perturbed,
    run_together,
)
from tests.head_checkpoints import make_eagle
from trtspec import LLM
from trtspec.backends.compiled import CONSTANTS, WEIGHTS
from trtspec.backends.table import BACKENDS
from trtspec.build.build import build_engine
from trtspec.build.engine_folder import EngineFolder
from trtspec.build.plan import BuildPlan
from trtspec.config.checkpoint.model import ModelConfig
from trtspec.config.engine import EngineConfig
from trtspec.interop.reading import read_speculative_config
from trtspec.methods.eagle3.train import export_eagle3, new_head
from trtspec.models.weights import load_decoder

K = 3
CASES = draw_cases(60, seed=3)
# 8 requests of up to 104 tokens in 40 blocks of 4, and 8 * (K + 1) rows a step. So requests are preempted, and chunks
# of prompts run together with generations.
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_num_tokens": 32, "block_size": 4}
TIGHT = {"num_kv_blocks": 41}
MODES = ("none", "ngram", "draft", "eagle3")


def make_models(folder: Path, num_layers: int = 3) -> Path:
    """Write target/, draft/ (target with noise), head/ (EAGLE3) and eagle/, all untrained, with 16 ids.

    Each draft model guesses right now and then. num_layers: of the target.
    """
    target = make_target(folder, num_hidden_layers=num_layers)
    add_tokenizer(target)
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }} {{ messages[0].content }}")
    perturbed(target, noise=0.15)
    config = ModelConfig.from_folder(target)
    torch.manual_seed(1)  # with this seed, every position is right now and then
    captured = tuple(range(num_layers))
    head = new_head(load_decoder(config, torch.float32), captured, torch.arange(13))
    export_eagle3(head, config, captured, folder / "head", torch.float32)
    make_eagle(folder, target, num_hidden_layers=2, fc_bias=True, seed=4)  # likewise, with this seed
    return folder


def speculation(mode: str, models: Path) -> dict[str, Any] | None:
    eagle3 = {"method": "eagle3", "model": str(models / "head"), "num_speculative_tokens": K}
    eagle = {"method": "eagle", "model": str(models / "eagle"), "num_speculative_tokens": K}
    return {
        "none": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": K},
        "draft": {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": K},
        "draft_inside": {
            "method": "draft_model",
            "model": str(models / "draft"),
            "num_speculative_tokens": K,
            "one_engine": True,
        },
        "eagle3": {**eagle3, "draft_len_schedule": {5: K, 7: 1}},  # more than 7 requests: no drafts
        "eagle3_two_engine": {**eagle3, "one_engine": False},
        "eagle": eagle,
        "eagle_two_engine": {**eagle, "one_engine": False},
        "hidden": {
            "method": "extract_hidden_states",
            "output_directory": str(models / "saved"),
            "capture_layers": (0, 1),
        },
    }[mode]


def wishes(mode: str, models: Path, schedule: bool) -> dict[str, Any] | None:
    """The speculation of `mode`.

    Unless `schedule`, eagle3 has no schedule of draft lengths: its graphs are for one K.
    """
    found = speculation(mode, models)
    if found is not None and not schedule:
        found.pop("draft_len_schedule", None)
    return found


def build(models: Path, output: Path, backend: str, mode: str, dtype: str, schedule: bool = False) -> Path:
    """Build an engine folder and return it."""
    cache = TIGHT if BACKENDS[backend].profiles else {}  # the size of the cache is part of such an engine
    config = EngineConfig(backend=backend, dtype=dtype, **LIMITS, **cache)
    build_engine(models / "target", output, read_speculative_config(wishes(mode, models, schedule)), config)
    return output


def assert_as_planned(plan: BuildPlan, folder: Path) -> dict[str, dict[str, int]]:
    """Check that an engine folder holds the executables of the plan.

    Returns the bytes of each weight that was written, by executable and name.
    """
    engine = EngineFolder.open(folder)
    assert engine is not None
    built, written = engine.data["executables"], {}
    assert plan.executables.keys() == built.keys()
    for role, made in plan.executables.items():
        graphs = [(g["draft_len"], "uniform" if g["uniform"] else "ragged", g["inputs"]) for g in built[role]["graphs"]]
        assert [(g.draft_len, g.kind, [i.name for i in g.inputs]) for g in made.graphs] == graphs
        assert [output.name for output in made.graphs[0].outputs] == built[role]["outputs"]
        assert [list(shape) for shape in made.kv.layers] == [[heads, size] for heads, size, _ in built[role]["kv"]]
        assert made.kv.dtype == built[role]["dtype"]
        assert made.weights_per_step == built[role]["weight_bytes"]
        files = [file for name in (WEIGHTS, CONSTANTS) if (file := folder / role / name).is_file()]
        written[role] = {name: tensor.nbytes for file in files for name, tensor in load_file(file).items()}
    return written


def packed(llm: LLM) -> Run:
    run = run_together(llm.engine, CASES)
    assert llm.engine.loop.scheduler.num_preemptions > 0
    assert run.num_mixed_steps > 0 or llm.engine.loop.proposer.speculation is None
    assert_all_blocks_free(llm)
    return run


def assert_speculation_changes_nothing(llm: LLM, plain: list[Outcome], mode: str) -> None:
    """Check packed runs against plain decoding of each case alone: other graphs and rows produce the same outcomes.

    Drafts are right now and then at every position.
    """
    run = packed(llm)
    assert run.outcomes == plain
    if mode != "none":
        assert all(0 < share < 1 for share in run.speculation.acceptance_per_position)
        assert len(run.speculation.acceptance_per_position) == K


def assert_words_are_those_of_eager(
    engine: Path, models: Path, mode: str, plain: list[Outcome], schedule: bool = False
) -> None:
    """Check that an fp32 engine and eager return the same ids and accept the same drafts.

    plain: eager's outcomes of plain decoding, each case alone.
    """
    compiled = packed(LLM(engine, **TIGHT))
    eager = packed(LLM(models / "target", wishes(mode, models, schedule), **LIMITS, **TIGHT))
    assert compiled.outcomes == eager.outcomes == plain
    assert compiled.speculation == eager.speculation
