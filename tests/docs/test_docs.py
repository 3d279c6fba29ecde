"""The documentation is right: its code runs, its links lead somewhere, and its site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks_of, run_blocks, run_page

QUICK = ("README.md",)
"""Pages whose code `make test` runs; `make test-docs` runs all."""


def _case(page: Path) -> Any:
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=[] if name in QUICK else [pytest.mark.docs])


@pytest.mark.parametrize("page", [_case(page) for page in PAGES])
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize(("language", "code"), [("python", "1 / 0"), ("bash", "false"), ("json", "{"), ("", "text")])
def test_a_block_that_fails_is_noticed(language: str, code: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError)):
        run_blocks(f"# x\n\n```{language}\n{code}\n```\n", "page", tmp_path)


def test_no_block_is_left_out_without_a_reason() -> None:
    with pytest.raises(AssertionError, match="no accepted reason"):
        list(blocks_of("<!-- not run: I do not feel like it -->\n```bash\nfalse\n```\n"))


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="no mkdocs-material: pip install 'trtspec[dev]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
