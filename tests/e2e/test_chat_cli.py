"""`trtspec chat` in a pseudo-terminal: turns, a stopped answer, a window that changes its size, bad models."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtspec import LLM, SamplingParams
from trtspec.cli import main
from trtspec.outputs import OutputDelta

DEMO = Path(__file__).parents[2] / "examples" / "demo"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _take_terminal() -> None:
    """Take the terminal, as a shell does it.

    Ctrl-C ends the program, even if the tests were started with SIGINT ignored.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program in a terminal of its own. seen: its output, without colours and moves of the cursor."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(24, 80)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trtspec", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        os.close(slave)
        self.raw = ""

    @property
    def seen(self) -> str:
        return _SEQUENCE.sub("", self.raw).replace("\r", "")

    def read(self, until: str, after: int = 0, more: int = 0) -> str:
        """Return `seen` from `after` on, once that part has `until` and is longer than `more`."""
        end = time.monotonic() + 30
        while until not in self.seen[after:] or len(self.seen) - after <= more:
            assert time.monotonic() < end, (
                f"{until!r} did not come; seen: {self.seen[after:]!r} after {self.seen[:after][-300:]!r}"
            )
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.raw += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:  # the program has ended
                    assert until in self.seen[after:], self.seen
        return self.seen[after:]

    def settle(self) -> int:
        """Return the length of `seen` once nothing was written for half a second."""
        while select.select([self.master], [], [], 0.5)[0]:
            self.raw += os.read(self.master, 65536).decode("utf-8", "replace")
        return len(self.seen)

    def ask(self, line: str, until: str = "> ") -> str:
        """Type a line and return the output that follows, without the line itself."""
        before = len(self.seen)
        os.write(self.master, line.encode() + b"\n")
        self.read("\n", before)
        start = before + self.seen[before:].index("\n") + 1
        return self.read("\n" + until, start).removesuffix("\n" + until)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window. The program, if there is one, gets a signal."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> int:
        """End the program by Ctrl-D and return its exit status."""
        os.write(self.master, b"\x04")
        return self.process.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target. It continues a text as if it were a conversation."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(DEMO / "target", folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def chat(model: Path) -> Iterator[Terminal]:
    """A chat that tests share, because it takes seconds to start."""
    own = Terminal(
        "chat", str(model), "--backend", "eager", "--spec-model", str(DEMO / "draft"), "--spec-tokens", "3",
        "--temperature", "0", "--max-tokens", "24", "--max-seq-len", "256", "--system", "import os",
    )  # fmt: skip
    try:
        own.read("> ")
        yield own
        assert own.close() == 0
    finally:
        own.process.kill()
        own.process.wait()
        os.close(own.master)


@pytest.fixture
def terminal(chat: Terminal) -> Terminal:
    """The shared chat, in a new conversation."""
    assert chat.ask("/new").strip() == "a new conversation"
    return chat


def answers(model: Path, questions: list[str]) -> list[str]:
    """The answers of a whole conversation, by LLM."""
    messages = [{"role": "system", "content": "import os"}]
    said = []
    with LLM(model, backend="eager") as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
            said.append(output.outputs[0].text)
            messages.append({"role": "assistant", "content": said[-1]})
    return said


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_turns_follow_one_another_and_their_worth_is_shown(model: Path, terminal: Terminal) -> None:
    questions = ["class Stack:", "    def pop(self):"]
    first, second = answers(model, questions)
    before = len(terminal.raw)
    assert second != answers(model, questions[1:])[0]  # the conversation matters
    for question, expected in zip(questions, (first, second), strict=True):
        *said, worth = lines(terminal.ask(question))
        assert said == lines(expected)
        assert re.fullmatch(r"24 tokens · \d+ tok/s · [\d.]+ tokens per step · drafts accepted [\d ]+ %", worth), worth
    assert "\x1b[32m" in terminal.raw[before:]  # accepted drafts are green
    *said, _ = lines(terminal.ask("/retry"))  # greedy: the same answer after the same first turn
    assert said == lines(second)
    terminal.ask("/new")
    *said, _ = lines(terminal.ask(questions[0]))
    assert said == lines(first)
    assert "/exit" in terminal.ask("/help")
    assert "/exit" in terminal.ask("/nonsense")


def test_a_line_that_ends_with_a_backslash_goes_on(model: Path, terminal: Terminal) -> None:
    [expected] = answers(model, ["class A:\n    def b"])
    os.write(terminal.master, b"class A:\\\n")
    terminal.read("  ", len(terminal.seen))
    *said, _ = lines(terminal.ask("    def b"))
    assert said == lines(expected)


def test_ctrl_c_ends_an_answer_and_the_window_may_change_meanwhile(model: Path) -> None:
    own = Terminal("chat", str(model), "--backend", "eager", "--temperature", "0.8", "--seed", "1")
    try:
        own.read("> ")
        start = len(own.seen)
        os.write(own.master, b"import unittest\n")
        own.read("\n", start, more=60)
        own.resize(8, 20)
        os.write(own.master, b"\x03")
        own.read("stopped · ", start)
        own.read("> ", start + own.seen[start:].index("stopped"))
        own.resize(50, 200)
        start = own.settle()  # a signal that comes while readline draws waits for the next key
        os.write(own.master, b"\x03")  # at the prompt: another prompt
        own.read("> ", start)
        start = own.settle()
        os.write(own.master, b"/retry\n")  # the stopped answer is part of the conversation
        own.read("\n", start, more=20)
        os.write(own.master, b"\x03")
        own.read("stopped", start)
        own.read("> ", start + own.seen[start:].index("stopped"))
        assert own.process.poll() is None
        assert own.close() == 0
        assert "Traceback" not in own.seen
    finally:
        own.process.kill()
        os.close(own.master)


def test_the_conversation_outlives_a_question_that_has_no_room(model: Path, terminal: Terminal) -> None:
    expected = answers(model, ["def add(a, b):"])
    assert "max_seq_len" in terminal.ask("pass; " * 600)
    *said, _ = lines(terminal.ask("def add(a, b):"))
    assert said == lines(expected[0])


@pytest.mark.parametrize(
    ("model_name", "complaint"),
    [("nowhere/at/all", "nowhere"), (str(DEMO / "target"), "chat template")],
)
def test_a_model_that_cannot_chat_is_refused(
    model_name: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", model_name, "--backend", "eager"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("trtspec: ")
    assert complaint in said


def test_bad_sampling_is_refused_before_the_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "nowhere", "--temperature", "-1"]) == 1
    assert "temperature" in capsys.readouterr().err


def test_generate_shows_the_drafts_of_a_chat_and_its_failure(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(model), "--backend", "eager", "--chat", "--prompt", "def add("]
    command += ["--temperature", "0", "--max-tokens", "24"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert main([*command, "--show-drafts"]) == 0
    assert capsys.readouterr().out == told
    failure = OutputDelta(0, 0, "", (), 0, "error", None, "poisoned row")
    monkeypatch.setattr(LLM, "stream", lambda *arguments: iter([failure]))
    assert main([*command, "--show-drafts"]) == 1
    assert capsys.readouterr().err.endswith("trtspec: poisoned row\n")


def test_without_a_terminal_lines_are_questions(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["def add(a, b):", "/help"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions) + "\n"))
    options = ["--temperature", "0", "--max-tokens", "24", "--max-seq-len", "256", "--system", "import os"]
    assert main(["chat", str(model), "--backend", "eager", *options]) == 0
    assert capsys.readouterr().out == "".join(text.removesuffix("\n") + "\n" for text in answers(model, questions))
