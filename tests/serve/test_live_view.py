"""The live view in headless Chromium, against a real server: a person sees what the API says.

TRTSPEC_SCREENSHOTS=DIR writes live-light.png and live-dark.png to DIR.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from examples.demo.engines import build_missing
from examples.smollm2.__main__ import model_folder
from tests.serve.chromium import installed
from tests.serve.live_page import View, choice, one, shown, steps_of
from tests.serve.page_checks import CONTRAST, UNLABELLED
from tests.serve.server import EAGLE3, Server, running

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'trtspec[dev]'")
expect = playwright.expect

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
PROMPT = "import os\n\n\nclass Reader:\n    def "
TREES = {"method": "ngram", "num_speculative_tokens": 3, "max_total_draft_tokens": 7, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for this module alone: while playwright runs, no other event loop can run in this thread."""
    found = installed()
    if found is None:
        pytest.skip("no Chromium: TRTSPEC_CHROMIUM or PATH may name one, `python -m tests.serve.chromium` gets one")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found[0], env={**os.environ, **found[1]})
        yield chromium
        chromium.close()


@pytest.fixture
def open_view(browser: Any) -> Iterator[Callable[..., View]]:
    """A function that opens pages; each page must log nothing and request nothing from other servers."""
    views: list[View] = []

    def opened(server: Server, **options: Any) -> View:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        view = View(context.new_page(), server)
        views.append(view)
        view.page.on("console", lambda message: view.complaints.append(message.text))
        view.page.on("pageerror", lambda error: view.complaints.append(str(error)))
        view.page.on("request", lambda request: view.asked.append(request.url))
        view.page.goto(server.url)
        expect(view.page.locator("#state")).to_have_text("ready")
        return view

    yield opened
    for view in views:
        view.page.context.close()
        assert view.complaints == []
        assert [url for url in view.asked if not url.startswith(f"{view.server.url}/")] == []


@pytest.fixture
def view(open_view: Callable[..., View], server: Server) -> View:
    return open_view(server)


def test_what_is_typed_is_run_and_each_token_is_marked_as_the_api_says(view: View) -> None:
    keyboard = view.page.keyboard  # the prompt has the focus from the start
    keyboard.press("Control+A")
    for line in PROMPT.split("\n"):
        keyboard.type(line)
        keyboard.press("Enter")
    keyboard.press("Backspace")
    keyboard.press("Tab")
    keyboard.type("60")
    keyboard.press("Control+Enter")
    expect(view.page.locator("#status")).to_have_text("Done.", timeout=60_000)

    steps, text, usage = steps_of(view.server, prompt=PROMPT, max_tokens=60, temperature=0, num_speculative_tokens=3)
    expected = []
    for step in steps:
        expected += [("accepted", word) for word in step["accepted"]]
        expected += [("rejected", shown(word)) for word in step["rejected"]]
        expected += [("bonus" if step["draft_len"] else "plain", word) for word in step["bonus"]]
    assert view.tokens() == expected
    assert view.text() == text
    assert {kind for kind, _ in expected} == {"accepted", "rejected", "bonus", "plain"}

    assert view.figure("tokens") == "60"
    assert view.figure("steps") == str(usage["speculation"]["steps"])
    accepted, num_drafts = usage["speculation"]["accepted_tokens"], usage["speculation"]["num_drafts"]
    assert view.figure("length") == f"{1 + accepted / num_drafts:.2f}"
    assert view.figure("per-step") == f"{59 / usage['speculation']['steps']:.2f}"
    assert float(view.figure("speed")) > 0
    assert view.figure("first").endswith(" ms")
    shares = view.page.locator(".bars .share").all_inner_texts()
    counted = [re.search(r"\((\d+)/(\d+)\)", share) for share in shares]
    assert len(counted) == 3
    assert sum(int(one[1]) for one in counted if one) == usage["speculation"]["accepted_tokens"]
    assert sum(int(one[2]) for one in counted if one) == usage["speculation"]["drafted_tokens"]


def test_kinds_differ_by_more_than_colour_and_rejected_ones_can_be_hidden(view: View) -> None:
    view.settings(prompt=PROMPT, max_tokens=40)
    view.run("Done")
    lines = {}
    for kind in ("accepted", "rejected", "bonus", "plain"):
        token = view.page.locator(f".output .{kind}").first
        lines[kind] = token.evaluate(
            "t => [getComputedStyle(t).textDecorationLine, getComputedStyle(t).textDecorationStyle]"
        )
    assert lines["accepted"] == ["underline", "solid"]
    assert lines["rejected"] == ["line-through", "solid"]
    assert lines["bonus"] == ["underline", "dotted"]
    assert lines["plain"][0] == "none"
    assert view.page.locator(".legend .token").count() == 4
    rejected = view.page.locator(".output .rejected").first
    expect(rejected).to_be_visible()
    view.settings(show_rejected=False)
    expect(rejected).to_be_hidden()


def test_branches_of_a_tree_stand_where_they_were_guessed(view: View) -> None:
    tree = {**one(["a", "b"], ["x", "y", "z", "q"], ["c"]), "parents": [-1, 0, -1, 2, 1, 1]}
    lone = {**one([], ["u", "v"], ["d"]), "parents": [-1, -1]}
    view.answer(choice("!", one([], [], ["!"])), choice("abc", tree), choice("d", lone))
    view.run("Done")
    texts = ["!", "xy", "a", "b", "zq", "c", "uv", "d"]
    kinds = ["plain", "rejected", "accepted", "accepted", "rejected", "bonus", "rejected", "bonus"]
    assert view.tokens() == list(zip(kinds, texts, strict=True))
    assert view.page.locator(".output .branch").all_inner_texts() == ["xy", "z", "q", "u", "v"]
    z, q = (view.page.locator(".output .branch").nth(i).bounding_box()["y"] for i in (1, 2))
    assert z < q, "one below the other"
    counted = [share[share.index("(") :] for share in view.page.locator(".bars .share").all_inner_texts()]
    assert counted == ["(1/2)", "(1/1)", "(0/1)"]


def test_two_settings_are_compared_side_by_side(view: View) -> None:
    view.settings(prompt=PROMPT, max_tokens=80, temperature=0.8, seed="", compare=True, k=3, other_k=0)
    view.run(r"^Texts are equal \(\d+ characters\)\.$")
    assert view.text(0) == view.text(1) != ""
    assert {kind for kind, _ in view.tokens(1)} == {"plain"}
    assert [view.figure(name, 1) for name in ("steps", "per-step", "length")] == ["79", "1.00", "–"]
    assert float(view.figure("length", 0)) > 1
    left, right = (view.page.locator(".pane").nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    view.settings(in_turn=True)
    view.run(r"^Texts are equal .* K = [03]: \d+\.\d\dx the speed of K = [03]\.$")
    view.answer(choice("x", one([], [], ["x"])))  # a single step has no speed
    view.run(r"^Texts are equal \(1 characters\)\.$")


def test_texts_that_differ_are_said_to(view: View) -> None:
    def answer(route: Any) -> None:
        k = route.request.post_data_json["num_speculative_tokens"]
        event = choice(f"same {k}", one([], [], ["same", f" {k}"]))
        route.fulfill(status=200, body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    view.page.route("**/v1/completions", answer)
    view.settings(compare=True, k=2, other_k=1)
    view.run(r"^Texts differ from character 6 on\.$")


def test_a_run_shows_its_text_as_it_comes_and_escape_frees_it(view: View) -> None:
    view.settings(prompt=PROMPT, max_tokens=1900, k=0)
    view.page.locator("#prompt").press("Control+Enter")
    expect(view.page.locator(".output .token").nth(20)).to_be_attached()
    expect(view.page.locator("#status")).to_have_text("Running.")
    assert view.server.metric("trtspec_running") == 1
    expect(view.page.locator(".now").nth(3)).to_have_text("1")  # batch size, in the charts
    view.page.keyboard.press("Escape")
    expect(view.page.locator("#status")).to_have_text("Stopped.")
    view.server.wait_idle()
    count = len(view.tokens())
    assert 20 < count < 1900
    expect(view.page.locator(".now").nth(3)).to_have_text("0")
    assert len(view.tokens()) == count
    paths = view.page.locator(".charts path").evaluate_all("paths => paths.map(p => p.getAttribute('d'))")
    assert len(paths) == 6
    assert all(path.startswith("M") for path in (paths[i] for i in (0, 1, 3, 4, 5)))


def test_the_theme_is_the_systems_until_one_is_chosen_which_is_remembered(
    open_view: Callable[..., View], server: Server
) -> None:
    view = open_view(server, color_scheme="dark")
    dark = view.page.evaluate(BACKGROUND)
    view.page.locator("#theme").select_option("light")
    light = view.page.evaluate(BACKGROUND)
    assert dark != light
    view.page.reload()
    expect(view.page.locator("#theme")).to_have_value("light")
    assert view.page.evaluate(BACKGROUND) == light
    view.page.locator("#theme").select_option("system")
    assert view.page.evaluate(BACKGROUND) == dark


def test_everything_has_a_name_and_enough_contrast(view: View) -> None:
    view.settings(prompt=PROMPT, max_tokens=60, compare=True)
    view.run("equal")
    view.page.evaluate("document.getElementById('key-field').hidden = false")
    view.page.evaluate("document.getElementById('problem').textContent = 'What went wrong.'")
    backgrounds = set()
    for scheme in ("light", "dark"):
        view.page.emulate_media(color_scheme=scheme)
        backgrounds.add(view.page.evaluate(BACKGROUND))
        assert view.page.evaluate(UNLABELLED) == []
        measured = view.page.evaluate(CONTRAST)
        assert len(measured) > 60
        assert [one for one in measured if one["ratio"] < 4.5] == []
    assert len(backgrounds) == 2


def test_the_keyboard_reaches_all_there_is_and_shows_where_it_is(view: View) -> None:
    view.settings(prompt=PROMPT, max_tokens=8, compare=True)
    view.run("equal")
    view.page.locator("#theme").focus()
    reached = []
    for _ in range(15):
        focused = view.page.evaluate(
            "(() => { const f = document.activeElement, s = getComputedStyle(f);"
            " return [f.id || f.className, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]; })()"
        )
        reached.append(focused[0])
        assert focused[1], f"{focused[0]} does not show that it has the focus"
        view.page.keyboard.press("Tab")
    fields = ["theme", "prompt", "max-tokens", "temperature", "seed", "k", "other-k", "run", "stop"]
    assert reached == [*fields, "compare", "in-turn", "chat", "show-rejected", "output", "output"]


def test_no_width_makes_the_page_scroll_sideways(view: View) -> None:
    view.settings(prompt=PROMPT, max_tokens=60, compare=True)
    view.run("equal")
    for width in (320, 768, 2560):
        view.page.set_viewport_size({"width": width, "height": 800})
        assert view.page.evaluate("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]


def test_errors_are_said_in_words(view: View) -> None:
    problem = view.page.locator("#problem")
    view.settings(max_tokens=100_000)
    view.run("Failed")
    expect(problem).to_contain_text("exceed the context of 2048")
    view.settings(max_tokens=8, k=4)  # the engine's K is 3
    view.page.locator("#prompt").press("Control+Enter")
    assert view.page.locator("#k").evaluate("k => k.validationMessage") != ""
    view.answer({"choices": [{"text": "ab", "speculation": one(["a"], [], ["b"])}]}, done=False)
    view.settings(k=3)
    view.run("Failed")
    expect(problem).to_contain_text("closed the stream before it was complete")
    assert view.text() == "ab"
    view.answer({"error": {"message": "the engine has ended; the request is lost"}})
    view.run("Failed")
    expect(problem).to_have_text("the engine has ended; the request is lost")
    assert view.complaints == ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]
    view.complaints.clear()


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        (  # markup is text
            [choice("<img src=x onerror=alert(1)><b>", one(["<img src=x onerror=alert(1)>"], ["</div>"], ["<b>"]))],
            [("accepted", "<img src=x onerror=alert(1)>"), ("rejected", "</div>"), ("bonus", "<b>")],
        ),
        (  # a character of two tokens, which has no text until both have come
            [choice("a", one(["a"], ["x"], ["�"])), choice("é b", one(["�"], [], [" b"]))],
            [("accepted", "a"), ("rejected", "x"), ("bonus", "é"), ("bonus", " b")],
        ),
        (  # tokenizers that drop the blank of a word that stands alone
            [choice("two words", one(["two"], [], ["words"]))],
            [("accepted", "two"), ("bonus", " words")],
        ),
        (  # text that is held back as a possible stop string, and is one; a token without text
            [choice("a", one(["a", "ST"], ["y"], ["O"])), choice("", one(["P"], [], ["<|end|>"]))],
            [("accepted", "a"), ("rejected", "y")],
        ),
    ],
    ids=["markup", "halves", "blanks", "stop"],
)
def test_tokens_find_their_text(view: View, events: list[dict[str, Any]], tokens: list[tuple[str, str]]) -> None:
    view.answer(*events)
    view.run("Done")
    assert view.tokens() == tokens
    assert view.page.locator(".output img, .output b").count() == 0


@pytest.mark.long
def test_an_engine_that_dies_is_said_to_have(open_view: Callable[..., View], model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "log", EAGLE3) as server:
        view = open_view(server)
        state = view.page.locator("#state")
        view.settings(max_tokens=1900, k=0)
        view.page.locator("#prompt").press("Control+Enter")
        expect(view.page.locator(".output .token").nth(5)).to_be_attached()
        os.kill(server.engine_pid, signal.SIGKILL)
        expect(view.page.locator("#problem")).to_contain_text("the engine has ended")
        expect(view.page.locator(".progress")).to_have_text("failed")
        expect(state).to_have_text("restarting")
        expect(state).to_have_text("ready", timeout=30_000)
        expect(state).to_have_attribute("title", "the last engine ended: exit status -9")
        view.settings(max_tokens=8)
        view.run("Done")
        expect(view.page.locator("#problem")).to_be_hidden()
        view.page.close()  # before the server ends, which the page would complain of


def lines_of(step: dict[str, Any]) -> list[str]:
    """Each branch of a step's tree from where it leaves the accepted path."""
    words, parents, accepted = step["accepted"] + step["rejected"], step["parents"], len(step["accepted"])
    lines = []
    for leaf in (node for node in range(accepted, len(words)) if node not in parents):
        node, line = leaf, ""
        while node >= accepted:
            line, node = shown(words[node]) + line, parents[node]
        lines.append(line)
    return lines


def test_a_key_is_asked_for_and_kept_until_the_tab_is_closed(
    open_view: Callable[..., View], model: Path, tmp_path: Path
) -> None:
    """The server here drafts trees, which are shown once the key is known."""
    with running(model, tmp_path / "log", TREES, ["--api-key", "secret"]) as server:
        view = open_view(server)
        key = view.page.locator("#key")
        expect(key).to_be_visible()
        view.settings(prompt=PROMPT, max_tokens=60, temperature=0)
        view.run("Failed")
        expect(view.page.locator("#problem")).to_contain_text("no valid API key")
        expect(key).to_be_focused()
        view.page.keyboard.type("secret")
        view.run("Done")
        asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "num_speculative_tokens": 3}
        shows_trees(view, *steps_of(server, "secret", **asked))
        assert view.page.evaluate("sessionStorage.getItem('trtspec-key')") == "secret"
        assert "secret" not in view.page.evaluate("JSON.stringify(localStorage)")
        assert not any("secret" in url for url in view.asked)
        view.page.reload()
        expect(key).to_have_value("secret")
        server.process.terminate()
        expect(view.page.locator("#state")).to_have_text("no connection", timeout=20_000)
        server.process.wait(20)
        view.run("Failed")
        expect(view.page.locator("#problem")).to_contain_text("cannot be reached")
        assert all(complaint.startswith("Failed to load resource") for complaint in view.complaints)
        view.complaints.clear()


def shows_trees(view: View, steps: list[dict[str, Any]], text: str, _: dict[str, Any]) -> None:
    """Check that the page shows the branches of these steps."""
    assert view.text() == text
    assert any(len(set(step["parents"])) < len(step["parents"]) for step in steps), "a branch"
    told = sorted(line for step in steps for line in lines_of(step))
    assert sorted(view.page.locator(".output .branch").all_inner_texts()) == told
    assert sum(len(step["accepted"]) for step in steps) == sum(kind == "accepted" for kind, _ in view.tokens()) > 0


@pytest.mark.skipif("TRTSPEC_SCREENSHOTS" not in os.environ, reason="TRTSPEC_SCREENSHOTS names no folder to write to")
def test_screenshots(open_view: Callable[..., View], tmp_path: Path) -> None:
    """Take screenshots of real runs of the demo's assistant, compiled as `make demo` compiles it.

    Other requests run before for half a minute, so that the charts show something.
    """
    model_folder()  # downloads the assistant
    engine = build_missing(["assistant-eagle3"], Console())["assistant-eagle3"]
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    with running(engine, tmp_path / "assistant.log") as server:

        def others(i: int) -> None:
            prompt = asked.format(f"Write a Python function that returns the sum of {i} numbers.")
            body = {"prompt": prompt, "max_tokens": 60 + 10 * i, "temperature": 0.7}
            time.sleep(i)
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        for scheme in ("light", "dark"):
            view = open_view(server, color_scheme=scheme)
            with ThreadPoolExecutor(24) as pool:
                list(pool.map(others, range(24)))
            prompt = "Write a Python function that says whether a string is a palindrome."
            view.settings(prompt=prompt, max_tokens=160, temperature=0, seed=7, compare=True, in_turn=True, chat=True)
            view.run("equal")
            view.page.screenshot(path=Path(os.environ["TRTSPEC_SCREENSHOTS"]) / f"live-{scheme}.png")
