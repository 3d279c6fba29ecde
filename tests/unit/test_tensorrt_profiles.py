"""The shapes that a TensorRT engine is built for cover every batch within its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.backends.graph_io import INPUTS as ROWS
from trtspec.backends.sizes import Sizes
from trtspec.backends.tensorrt.profiles import TensorRTOptions, profiles
from trtspec.config.engine import EngineConfig
from trtspec.errors import ConfigError, UnsupportedError

INPUTS = [name for name, row in ROWS.items() if row.taker in ("all", "verifies") and name != "tree_mask"]


@given(
    batch_size=st.integers(1, 64),
    draft_len=st.integers(0, 8),
    spare_rows=st.integers(0, 5000),
    max_seq_len=st.integers(1, 5000),
    block_size=st.sampled_from([1, 4, 16, 64]),
    opt_num_tokens=st.none() | st.integers(1, 10_000),
)
def test_every_batch_within_the_limits_fits_the_mixed_profile(
    batch_size: int, draft_len: int, spare_rows: int, max_seq_len: int, block_size: int, opt_num_tokens: int | None
) -> None:
    rows = batch_size * (draft_len + 1) + spare_rows
    config = EngineConfig(max_batch_size=batch_size, max_num_tokens=rows, block_size=block_size)
    sizes = Sizes.of(config, max_seq_len, draft_len, blocks=100)
    mixed, generation = profiles(INPUTS, [(2, 64), (8, 128)], sizes, opt_num_tokens)
    for profile in (mixed, generation):
        assert profile.shapes.keys() == {*INPUTS, "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"}
        for least, usual, most in profile.shapes.values():
            assert all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True))
    B, K, most = batch_size, draft_len, {name: shapes[2] for name, shapes in mixed.shapes.items()}
    assert most["input_ids"] == (rows,)
    assert most["gather_ids"] == most["greedy"] == (B * (K + 1),)  # a context has one row of logits, no more
    assert most["draft_tokens"] == (B, K)
    assert mixed.shapes["draft_tokens"][0] == (0, K)  # contexts alone
    # A sequence at its end, with its drafts and the KV rows that the next drafts will write.
    assert most["block_tables"][0] == B
    assert most["block_tables"][1] * block_size >= max_seq_len - 1 + (K + 1) + max(K - 1, 0)
    assert most["v_cache_1"] == (100, block_size, 8, 128)
    assert generation.shapes["input_ids"][1] == generation.shapes["input_ids"][2] == (B * (K + 1),)
    assert mixed.shapes["input_ids"][1][0] <= min(rows, opt_num_tokens or rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, "attention = 'flash'; use one of plugin, native"),
        ({"hardware_compatibility": "ampere"}, "use one of none, ampere_plus, same_compute_capability"),
        ({"workers": 0}, "workers = 0 must be 1 or more"),
        ({"opt_num_tokens": 0}, "opt_num_tokens = 0 must be 1 or more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_options_that_are_none(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorRTOptions(**options)


def test_ranks_are_not_built() -> None:
    with pytest.raises(UnsupportedError, match=r"workers = 2: .* not built; use workers = 1"):
        TensorRTOptions(workers=2)
