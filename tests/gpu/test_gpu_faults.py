"""Faults on a GPU: of one request, and of the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_faults import VICTIM
from tests.gpu import faults

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_nan_logits_fail_their_request_alone(models: Path) -> None:
    faults.check_it_fails_alone(models / "target", VICTIM, poisoned=True)


def test_a_request_with_every_token_banned_fails_alone(models: Path) -> None:
    faults.check_it_fails_alone(models / "target", faults.BANNED, poisoned=False)


def test_a_device_side_assert_ends_all_requests_and_says_so(models: Path) -> None:
    """Runs in a process of its own, which ends without cleaning up: nothing runs on its GPU after the fault."""
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from tests.gpu.faults import lose_device, provoke_assert\n"
        f"print(lose_device(Path({str(models / 'target')!r}), provoke_assert), flush=True)\n"
        "os._exit(0)\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    faults.assert_lost(json.loads(done.stdout.splitlines()[-1]))
