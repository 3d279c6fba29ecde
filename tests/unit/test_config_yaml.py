"""YAML text: its layout, and the value that PyYAML reads back from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.errors import ConfigError
from trtspec.interop.yaml_text import to_yaml

TEXTS = st.text() | st.text(st.characters(categories=["Cc", "Cf", "Zs", "Zl", "Zp", "Cs", "Co"]), max_size=5)
WORDS = st.sampled_from(["yes", "No", "on", "null", "~", "1", "0x1f", "1e3", "2026-11-22", "a: b", "# c", "- d", "*e"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | WORDS
KEYS = st.integers() | st.text(max_size=50) | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Whether values are equal, with equal types (1 is not True, 1.0 is not 1). NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, b[key]) for key, x in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_pyyaml_reads_what_was_written(value: dict[Any, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    text = to_yaml(value)
    assert same(yaml.safe_load(text), value)
    yaml.reader.Reader(text.encode("utf-16"))  # a character that YAML forbids would be an error


@given(TEXTS)
def test_a_text_stays_on_one_line(text: str) -> None:
    assert len(to_yaml({"key": text}).splitlines()) == 1


def test_layout() -> None:
    value = {
        "speculative_config": {
            "decoding_type": "NGram",
            "draft_len_schedule": {1: 3, 8: 1},
            "layers": (1, 3, -1),
            "trees": [[0], [0, 0]],
            "in_line": [{"a": None}],
            "empty": {},
            "on": True,
            "tiny": 1e-7,
            "path": 'C:\\x "y"\n\u2028é\U0001f600',
        }
    }
    assert to_yaml(value) == (
        "speculative_config:\n"
        '  decoding_type: "NGram"\n'
        "  draft_len_schedule:\n"
        "    1: 3\n"
        "    8: 1\n"
        "  layers: [1, 3, -1]\n"
        "  trees: [[0], [0, 0]]\n"
        "  in_line: [{a: null}]\n"
        "  empty: {}\n"
        '  "on": true\n'
        "  tiny: 1.0e-07\n"
        '  path: "C:\\\\x \\"y\\"\\x0a\\u2028é\U0001f600"\n'
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"drafter": object()}, r"is a object, which cannot be written as YAML; use text or a number"),
        ({"s": {1, 2}}, r"\{1, 2\} is a set, which cannot"),
        ({True: 1}, r"True is a bool, which is no YAML key here"),
        ({None: 1}, r"None is a NoneType, which is no YAML key"),
    ],
)
def test_what_cannot_be_written_is_refused(value: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_yaml(value)
