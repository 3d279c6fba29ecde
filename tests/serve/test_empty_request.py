"""Requests that set no sampling field, through every entry point ("door").

docs/tasks/serve.md has a table of what such requests get; the tests try each of its cells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.tiny import add_tokenizer, make_target
from tests.serve.test_front import Engine, ask
from tests.serve.triton_models import ask as ask_triton
from tests.serve.triton_models import layouts
from trtspec import LLM, SamplingParams
from trtspec.cli import main
from trtspec.engine.core import EngineCore
from trtspec.engine.request import Request
from trtspec.sampling_params import RequestSampling
from trtspec.serve.engine.process import EngineServer
from trtspec.serve.triton.configs import LAYOUTS
from trtspec.text import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "serve.md"
SAYS: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTY = 1.3
SAMPLES = {"do_sample": True, **SAYS, "repetition_penalty": PENALTY}
CONTEXT = 60
PROMPT = "abcabc"


class Cells(NamedTuple):
    """The cells of a table row after the door's name."""

    where_it_samples: str
    where_not: str
    penalty: str
    most_tokens: str
    switch: str


def table() -> dict[str, Cells]:
    """Return the page's rows by door."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n### Defaults\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {door: Cells(*cells) for door, *cells in rows}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function of a name: a checkpoint with a generation_config.json that samples, one that does not, or none."""
    folders = {}
    for name, generation in (("samples", SAMPLES), ("greedy", {**SAMPLES, "do_sample": False}), ("none", None)):
        folder = folders[name] = make_target(tmp_path_factory.mktemp("empty") / name)
        add_tokenizer(folder)
        file = folder / "generation_config.json"
        file.unlink(missing_ok=True)
        if generation is not None:
            file.write_text(json.dumps(generation))
    return folders.__getitem__


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests that engines were asked to make."""
    found: list[Request] = []
    real = EngineCore.make_request

    def make_request(self: EngineCore, prompt: list[int], params: SamplingParams) -> list[Request]:
        samples = real(self, prompt, params)
        found.extend(samples)
        return samples

    monkeypatch.setattr(EngineCore, "make_request", make_request)
    return found


# -- the doors: each sends only a prompt -------------------------------------------------------------------------------

Knock = Callable[..., None]


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Knock]]:
    """Functions by their name in the table: knock(checkpoint, more fields, **options of the engine)."""

    def offline(folder: Path, fields: dict[str, Any], **options: Any) -> None:
        with LLM(folder, max_seq_len=CONTEXT, **options) as llm:
            if fields:
                llm.generate(PROMPT, SamplingParams(**fields))
            else:
                llm.generate(PROMPT)
                llm.generate(PROMPT, SamplingParams())
                llm.generate_async(PROMPT).result()

    def http(path: str, body: dict[str, Any]) -> Knock:
        def knock(folder: Path, fields: dict[str, Any], **options: Any) -> None:
            tokenizer = Tokenizer.from_folder(folder)
            assert tokenizer is not None
            tokenizer.chat_templates["default"] = "{{ messages[0].content }}"
            front = Engine(tokenizer, [1])
            assert ask(front, path, {**body, **fields}).status_code == 200
            (told,) = [message for message in front.told if "submit" in message]
            with LLM(folder, max_seq_len=512, num_kv_blocks=26, block_size=16, **served(monkeypatch, options)) as llm:
                channel: Any = None
                EngineServer(llm.engine, channel, "model").submit(0, told["prompt"], told["params"])

        return knock

    loads: list[Iterator[Callable[..., Any]]] = []

    def triton(layout: str, **required: Any) -> Knock:
        def knock(folder: Path, fields: dict[str, Any], **options: Any) -> None:
            assert not options  # options change nothing here
            loads.append(layouts(folder, tmp_path / f"{len(loads)}"))
            model = next(loads[-1])(layout)
            list(ask_triton(model, text_input=PROMPT, **required, **fields).sender)

        return knock

    yield {
        "`LLM.generate(prompt)`, `SamplingParams()`": offline,
        "`/v1/completions`": http("/v1/completions", {"prompt": PROMPT}),
        "`/v1/chat/completions`": http("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        "Triton, `llmapi`": triton("llmapi"),
        "Triton, `classic`": triton("classic", max_tokens=9),
    }
    for load in loads:
        next(load, None)


def served(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options as `trtspec serve` passes them on."""
    passed: list[dict[str, Any]] = []
    monkeypatch.setattr("trtspec.serve.server.serve", lambda settings, options: passed.append(options) or 0)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert main(["serve", "--model", "folder", *words]) == 0
    return {name: value for name, value in passed[0].items() if name in options}


# -- the meaning of the table's words ----------------------------------------------------------------------------------


def drawn(sampling: RequestSampling) -> str:
    if sampling.greedy:
        return "greedy"
    values = {name: getattr(sampling, name) for name in OFF}
    return {json.dumps(SAYS): "its values", json.dumps(OFF): "temperature 1"}.get(json.dumps(values), str(values))


def penalised(sampling: RequestSampling) -> str:
    return {PENALTY: "applies", 1.0: "ignored"}[sampling.repetition_penalty]


def limited(request: Request) -> str:
    room = request.length_limit - request.prompt_len
    return {16: "16", 400 - request.prompt_len: "the rest of the context", 9: "`max_tokens`, required"}.get(
        room, str(room)
    )


def the_one(values: list[str]) -> str:
    assert len(set(values)) == 1, values
    return values[0]


DOORS = list(table())


def test_the_table_has_every_door(doors: dict[str, Knock]) -> None:
    assert list(doors) == DOORS


@pytest.mark.parametrize("door", DOORS)
def test_what_the_table_says_is_what_is_drawn(
    doors: dict[str, Knock], made: list[Request], checkpoint: Callable[[str], Path], door: str
) -> None:
    row = table()[door]

    def knock(folder: str, **options: Any) -> list[Request]:
        made.clear()
        doors[door](checkpoint(folder), {}, **options)
        return list(made)

    samples = knock("samples")
    assert the_one([drawn(one.sampling) for one in samples]) == row.where_it_samples
    assert the_one([penalised(one.sampling) for one in samples]) == row.penalty
    assert the_one([limited(one) for one in samples]) == row.most_tokens
    greedy = knock("greedy")
    assert the_one([drawn(one.sampling) for one in greedy]) == row.where_not
    assert the_one([penalised(one.sampling) for one in greedy]) == row.penalty
    assert the_one([drawn(one.sampling) for one in knock("none")]) == row.where_not

    # The switch is an option of the engine or a field of the request.
    field = re.fullmatch(r"`(\w+)` 1: temperature 1", row.switch)
    if field is not None:
        made.clear()
        doors[door](checkpoint("samples"), {field[1]: 1.0})
        assert drawn(made[0].sampling) == "temperature 1"
        return
    option = re.fullmatch(r"`(?:--)?(generation.config)[= ]\"?off\"?`", row.switch)
    assert option is not None, row.switch
    off = knock("samples", **{option[1].replace("-", "_"): "off"})
    assert the_one([drawn(one.sampling) for one in off]) == row.where_not
    assert the_one([penalised(one.sampling) for one in off]) == "ignored"


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_classic_layout_wants_max_tokens(model: str) -> None:
    """The server refuses requests without max_tokens, because the models' config.pbtxt requires it."""
    (spec,) = [one for one in LAYOUTS["classic"] if one.name == model]
    assert {tensor.name for tensor in spec.inputs if not tensor.optional} == {"text_input", "max_tokens"}
