"""Engines of backend tensorrt_rtx, built by `trtspec build`'s own code: the demo's models, and a model of 1B's shape.

`make contract-tensorrt-rtx ARGS=--engines` builds them and writes tensorrt_rtx_engines.md. The large model has random
weights and two layers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.demo.engines import HERE as DEMO
from tests.checkpoints import make_checkpoint
from trtspec.backends.tensorrt.profiles import TensorRTOptions
from trtspec.build.build import build_engine
from trtspec.build.plan import plan_build
from trtspec.config.engine import EngineConfig
from trtspec.errors import UnsupportedError
from trtspec.interop.reading import read_speculative_config

TABLE = Path(__file__).with_name("tensorrt_rtx_engines.md")
ARCHITECTURES = ((89,), (120,), (89, 120))
EAGLE3 = {"method": "eagle3", "model": str(DEMO / "eagle3")}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
}  # fmt: skip


def engines(scratch: Path) -> Iterator[tuple[str, Path, dict[str, Any] | None, str, tuple[int, ...]]]:
    """Yield (model, its folder, speculation, dtype, architectures)."""
    target = DEMO / "target"
    for sm in ARCHITECTURES:
        yield "demo", target, None, "bfloat16", sm
    for K in (1, 3):
        yield "demo", target, {**EAGLE3, "num_speculative_tokens": K}, "bfloat16", (89, 120)
    yield "demo", target, NGRAM, "bfloat16", (89, 120)
    yield "demo", target, None, "float16", (89, 120)
    yield "demo", target, {**EAGLE3, "num_speculative_tokens": 1}, "float16", (89, 120)
    yield "1B, 2 layers", make_checkpoint(scratch, "llama", **LARGE), None, "bfloat16", (89, 120)


def main() -> int:
    """Build all engines and write the table -> exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, model, asked, dtype, sm) in enumerate(engines(Path(scratch))):
            config = EngineConfig(backend="tensorrt_rtx", dtype=dtype, max_batch_size=8, max_seq_len=512)
            speculation, options = read_speculative_config(asked), TensorRTOptions(sm=sm)
            begin = time.perf_counter()
            try:
                plan = plan_build(model, speculation, config, options=options)
                output = Path(scratch) / f"engine{number}"
                folder = build_engine(model, output, speculation, config, options=options).path
            except UnsupportedError as error:
                found = f"refused: {error} | |"
            else:
                weights = sum(plan.executables["target"].weights.values())
                size = sum(file.stat().st_size for file in folder.rglob("*.engine"))
                found = f"{size / 1e6:.1f} | {weights / 1e6:.1f} | {time.perf_counter() - begin:.0f}"
            method = "none" if asked is None else f"{asked['method']}, K = {asked['num_speculative_tokens']}"
            lines.append(f"| {name} | {method} | {dtype} | {', '.join(map(str, sm))} | {found} |")
            print(lines[-1], flush=True)
    TABLE.write_text("\n".join([*HEAD, *lines, ""]), encoding="utf-8")
    return 0


HEAD = [
    "# Engines of backend tensorrt_rtx",
    "",
    "Written by `make contract-tensorrt-rtx ARGS=--engines`, without a GPU: no plan has run. Batches of up to 8",
    "requests, 512 tokens each. Seconds are those of the whole build on this machine.",
    "",
    "| model | speculation | dtype | SM | plans, MB | weights, MB | seconds |",
    "|---|---|---|---|---|---|---|",
]


if __name__ == "__main__":
    raise SystemExit(main())
