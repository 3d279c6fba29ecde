"""Starts work out how large the KV cache may be without torch's compiler, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.contract.modes import RECIPES, Models
from trtspec.modes import SpeculativeDecodingMode as M

SCRIPT = """
import json, sys
from pathlib import Path
from trtspec.backends.table import BACKENDS
from trtspec.build.context import plan_context
from trtspec.build.kv_plan import kv_bytes_per_token
from trtspec.config.engine import EngineConfig
from trtspec.interop.reading import read_speculative_config

found = {}
for name, target, asked in json.load(sys.stdin):
    wanted = read_speculative_config(asked)
    context = plan_context(Path(target), wanted, EngineConfig(backend="eager"), BACKENDS["eager"])
    found[name] = kv_bytes_per_token(context), "torch._dynamo" in sys.modules
print(json.dumps(found))
"""


def test_no_mode_needs_the_compiler(tmp_path: Path) -> None:
    models = Models(tmp_path)
    asked = [
        (mode.name, str(models.folder(recipe.target)), recipe.speculation(models, 2))
        for mode, recipe in RECIPES.items()
        if mode is not M.USER_PROVIDED  # its drafter is an object
    ]
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    run = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [name for name, (_, imported) in found.items() if imported] == []
    assert found["EAGLE3_ONE_MODEL"][0] > found["NGRAM"][0] > 0
