"""The project's sentences are short, direct and say the thing itself, as far as a machine can check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.english import MEAN_WORDS, mean_words, num_words, problems, sentences

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDERS = ("trtspec", "plugins", "build_scripts", "benchmarks", "examples", "tests")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_are_plain(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        found += [f"{path.relative_to(ROOT)}:{one.line}: {one.what}: {one.sentence}" for one in problems(path)]
        mean = mean_words(path)
        if mean > MEAN_WORDS:
            found.append(f"{path.relative_to(ROOT)}: {mean:.1f} words a sentence; at most {MEAN_WORDS}")
    assert not found, "\n".join(found)


def test_pages_are_plain() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{one.line}: {one.what}: {one.sentence}" for path in PAGES for one in problems(path)
    ]
    found += [
        f"{path.relative_to(ROOT)}: {mean_words(path):.1f} words a sentence"
        for path in PAGES
        if mean_words(path) > MEAN_WORDS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "what"),
    [
        ("Of a folder: every constant of its graphs, once.", "begins with 'Of'"),
        ("See Format.", "only refers elsewhere"),
        ("See `core.SpecMetadata`.", "only refers elsewhere"),
        ("As Linear.pack.", "only refers elsewhere"),
        ("A row behind the last.", "'behind': say 'after'"),
        ("A model beside the target.", "'beside': say 'next to'"),
        (" ".join(["word"] * 31) + ".", "31 words"),
    ],
)
def test_what_breaks_a_rule_is_found(docstring: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'def f():\n    """{docstring}"""\n    return 1  # {docstring}\n')
    assert [one.what for one in problems(file, comments=False)] == [what]
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{docstring}\n")
    assert [one.what for one in problems(page)] == ([what] if "Of" not in what and "refers" not in what else [])


def test_plain_text_passes(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""The number of rows. `beside` is a parameter."""\n\n# A comment of one\n# sentence.\nx = 1\n')
    assert problems(file) == []
    assert mean_words(file) == pytest.approx((4 + 4 + 5) / 3)


def test_sentences_leave_code_out() -> None:
    text = "One sentence. Another one:\n\n    some(code)\n\n- an item\n- another\n\n```python\nmore(code)\n```\n"
    assert sentences(text) == ("One sentence.", "Another one:", "- an item", "- another")
    assert num_words("Call `f(a, b, c)` (or g) with [B, T] rows.") == 6
