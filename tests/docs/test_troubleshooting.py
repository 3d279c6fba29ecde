"""The sources can print each message that the page on troubleshooting quotes.

Quoted messages are the code of `### ` headings, of lines that begin with "Also:", and of the list after such a line.
`...` in a message stands for any text.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
_VARIES = "\0"


def quotes(page: str) -> list[str]:
    """The messages that a page quotes."""
    found: list[str] = []
    also = False
    for line in page.splitlines():
        also = line.startswith("Also:") or (also and (not line or line.startswith("- `")))
        if also or line.startswith("### `"):
            found += re.findall(r"`([^`]+)`", line)
    return found


def fixed_parts(quote: str) -> list[str]:
    """The texts that all messages of a quote have in common."""
    return [part for part in quote.split("...") if part.strip()]


@functools.cache
def templates(path: Path) -> tuple[str, ...]:
    """The texts that a source file writes, without docstrings. Each part that varies is replaced by a mark."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".cpp":
        return tuple(_VARIES.join(re.findall(r'"((?:[^"\\]|\\.)*)"', line)) for line in source.splitlines())
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [
        _text(node)
        for node in nodes
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and node not in docstrings
    ]
    # conversions in messages of logging vary, too
    return tuple(re.sub(r"%(?:\.\d+)?[sdrfg]", _VARIES, text) for text in texts if len(text) > 3)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return _VARIES


def not_in_sources(wanted: list[str]) -> list[str]:
    """The quotes whose fixed parts are not in any single text of the sources, in their order."""
    files = [path for folder in ("trtspec", "plugins") for path in sorted((ROOT / folder).rglob("*.*"))]
    sources = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".cpp")}
    words = {quote: re.findall(r"[A-Za-z_]{3,}", " ".join(fixed_parts(quote))) for quote in wanted}
    patterns = {quote: re.compile(".*".join(map(re.escape, fixed_parts(quote))), re.DOTALL) for quote in wanted}
    unseen = set(wanted)
    for path, source in sources.items():
        # parsing takes long: a file is parsed only if it has all words of a message
        possible = [quote for quote in unseen if all(word in source for word in words[quote])]
        texts = templates(path) if possible else ()
        unseen.difference_update(quote for quote in possible if any(map(patterns[quote].search, texts)))
    return sorted(unseen)


def test_every_quoted_message_is_in_the_sources() -> None:
    wanted = quotes(PAGE.read_text(encoding="utf-8"))
    assert len(wanted) >= 40
    assert [quote for quote in wanted if wanted.count(quote) > 1] == []
    assert [quote for quote in wanted if sum(map(len, fixed_parts(quote))) < 12] == []
    assert not_in_sources(wanted) == []


def test_every_message_has_an_explanation() -> None:
    sections = re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, rest = section.partition("\n")
        said = [part for part in rest.split("\n\n") if part.strip() and not part.strip().startswith(("Also:", "## "))]
        assert said, f"nothing is said of {heading}"


def test_a_message_that_is_not_in_the_sources_is_found() -> None:
    page = "### `method=... is unknown; use one of ...`\n\nAlso:\n\n- `the moon is ...`\n- `... is made of cheese`\n"
    page += "\n`no quote`\n\n- `nor this`\n\nAlso: `is missing; ...`\n"
    method, *others = quotes(page)
    assert method == "method=... is unknown; use one of ..."
    assert others == ["the moon is ...", "... is made of cheese", "is missing; ..."]
    assert not_in_sources([method, *others[:2]]) == ["... is made of cheese", "the moon is ..."]


def test_parts_must_be_in_one_text_and_in_order() -> None:
    assert not_in_sources(["... is unknown; use one of ... method="]) == ["... is unknown; use one of ... method="]
    assert not_in_sources(["is not what was built (its ... is unknown; use one of"]) != []
