"""The open page of the live view, and the API's figures for the same request."""

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
    """An open page, its console messages and errors, and the URLs that it requested."""

    page: Any
    server: Server
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def settings(self, **values: object) -> None:
        """Fill in fields by id; True and False are for checkboxes."""
        for name, value in values.items():
            element = self.page.locator(f"#{name.replace('_', '-')}")
            if isinstance(value, bool):
                element.set_checked(value)
            else:
                element.fill(str(value))

    def run(self, status: str) -> None:
        """Start a run from the keyboard and wait until the status matches `status`, a regular expression."""
        self.page.locator("#prompt").press("Control+Enter")
        expect(self.page.locator("#status")).to_have_text(re.compile(status), timeout=60_000)

    def tokens(self, pane: int = 0) -> list[tuple[str, str]]:
        """Return (kind, text) of each token of a pane, in order."""
        tokens = self.page.locator(".pane").nth(pane).locator(".output .token")
        pairs = tokens.evaluate_all("tokens => tokens.map(t => [t.classList[1], t.textContent])")
        return [(kind, text) for kind, text in pairs]

    def text(self, pane: int = 0) -> str:
        """Return the generated text of a pane."""
        return "".join(text for kind, text in self.tokens(pane) if kind != "rejected")

    def figure(self, name: str, pane: int = 0) -> str:
        """Return the text of a pane's figure, by its data-figure in index.html."""
        return str(self.page.locator(".pane").nth(pane).locator(f"[data-figure={name}]").inner_text())

    def answer(self, *events: dict[str, Any], done: bool = True) -> None:
        """Make the page receive this stream in place of the server's."""
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
        self.page.route("**/v1/completions", lambda route: route.fulfill(status=200, body="".join(lines)))


def shown(word: str) -> str:
    """Return a rejected draft as the page shows it."""
    return re.sub(r" {2,}|^ $", "␣", word.replace("\n", "↵").replace("\t", "⇥"))


def steps_of(server: Server, key: str = "none", **body: Any) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Stream a completion through the API -> the speculation of each step, the text, and the usage."""
    asked = {"stream": True, "return_speculation": True, "stream_options": {"include_usage": True}, **body}
    headers = {"Authorization": f"Bearer {key}"}
    steps, text, usage = [], "", {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                steps += [choice["speculation"] for choice in event["choices"]]
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage", usage)
    return steps, text, usage


def one(accepted: list[str], rejected: list[str], bonus: list[str]) -> dict[str, Any]:
    """Return the speculation of a step with these tokens."""
    drafts = len(accepted) + len(rejected)
    return {"accepted": accepted, "rejected": rejected, "bonus": bonus, "draft_len": drafts}


def choice(text: str, speculation: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"text": text, "speculation": speculation}]}
