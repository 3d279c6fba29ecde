"""The open page of the live view, and what the API says of the same request."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.serve.server import Server

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'trtspec[dev]'")
expect = playwright.expect


@dataclass
class View:
    """An open page, and what it has complained of and asked for."""

    page: Any
    server: Server
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def settings(self, **values: object) -> None:
        """Fill fields by id; True and False are for boxes."""
        for name, value in values.items():
            element = self.page.locator(f"#{name.replace('_', '-')}")
            if isinstance(value, bool):
                element.set_checked(value)
            else:
                element.fill(str(value))

    def run(self, status: str) -> None:
        """From the keyboard; until the status says so (a regular expression)."""
        self.page.locator("#prompt").press("Control+Enter")
        expect(self.page.locator("#status")).to_have_text(re.compile(status), timeout=60_000)

    def tokens(self, pane: int = 0) -> list[tuple[str, str]]:
        """(kind, text) of each, in order."""
        tokens = self.page.locator(".pane").nth(pane).locator(".output .token")
        pairs = tokens.evaluate_all("tokens => tokens.map(t => [t.classList[1], t.textContent])")
        return [(kind, text) for kind, text in pairs]

    def text(self, pane: int = 0) -> str:
        """What was generated."""
        return "".join(text for kind, text in self.tokens(pane) if kind != "rejected")

    def figure(self, name: str, pane: int = 0) -> str:
        """See index.html."""
        return str(self.page.locator(".pane").nth(pane).locator(f"[data-figure={name}]").inner_text())

    def answer(self, *events: dict[str, Any], done: bool = True) -> None:
        """Have this stream come in the server's place."""
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
        self.page.route("**/v1/completions", lambda route: route.fulfill(status=200, body="".join(lines)))


def shown(word: str) -> str:
    """A rejected draft as the page writes it."""
    return re.sub(r" {2,}|^ $", "␣", word.replace("\n", "↵").replace("\t", "⇥"))


def steps_of(server: Server, **body: Any) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """What each step did, the text, and the usage, as the API streams them."""
    asked = {"stream": True, "return_speculation": True, "stream_options": {"include_usage": True}, **body}
    steps, text, usage = [], "", {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                steps += [choice["speculation"] for choice in event["choices"]]
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage", usage)
    return steps, text, usage


def one(accepted: list[str], rejected: list[str], bonus: list[str]) -> dict[str, Any]:
    """A step's speculation."""
    drafts = len(accepted) + len(rejected)
    return {"accepted": accepted, "rejected": rejected, "bonus": bonus, "draft_len": drafts}


def choice(text: str, speculation: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"text": text, "speculation": speculation}]}
