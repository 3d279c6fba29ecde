"""Every command that needs a model takes it as a positional argument or as an option. It takes exactly one."""

from __future__ import annotations

import pytest

from trtspec.cli.main import COMMANDS, _parser
from trtspec.cli.options import engine_options
from trtspec.cli.train import KINDS
from trtspec.config.engine import EngineConfig

NEEDED = {
    "generate": ("--prompt", "x"),
    "build": ("--output_dir", "out"),
    "train": ("--data", "text", "--out", "out", "--steps", "1"),
    "triton-repo": ("--output-dir", "out"),
}
WITH_MODEL = [
    *((one.words, "model") for one in COMMANDS if one.takes_engine),
    ("build", "checkpoint_dir"),
    *((f"train {kind}", "target") for kind in KINDS),
]


@pytest.mark.parametrize(("words", "name"), WITH_MODEL)
def test_by_place_or_by_option(words: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, needed = words.split(), NEEDED.get(words.split()[0], ())
    parser = _parser(command)
    by_place = parser.parse_args([*command, "folder", *needed])
    assert getattr(by_place, name) == "folder"
    assert parser.parse_args([*command, *needed, f"--{name}", "folder"]) == by_place
    assert parser.parse_args([*command, f"--{name}=folder", *needed]) == by_place
    for model, complaint in (
        ([], f"one of the arguments MODEL --{name} is required"),
        (["a", f"--{name}", "b"], "not a"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*command, *model, *needed])
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


def test_limits_and_switches_reach_the_engine() -> None:
    """Each option is an argument of LLM only if it is given."""
    parser = _parser(["generate"])
    assert engine_options(parser.parse_args(["generate", "m"])) == {"dtype": "auto"}
    given = ["--block-size", "8", "--max-input-len", "9", "--no-enable-prefix-caching", "--no-enable-cuda-graph"]
    named = engine_options(parser.parse_args(["generate", "m", *given]))
    assert named == {
        "dtype": "auto", "block_size": 8, "max_input_len": 9, "enable_prefix_caching": False,
        "enable_cuda_graph": False,
    }  # fmt: skip
    EngineConfig(**named)
