"""The models in the format of OpenVINO GenAI, written by optimum-intel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.process import PeerError
from examples.smollm2.__main__ import HEAD, model_folder
from trtspec.build.sources import digest

WEIGHTS = {
    "bf16": ("fp16",),  # as many bytes; the CPU computes in bf16 if it has instructions for it
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--group-size", "32", "--ratio", "1.0"),
}


def folders_of(
    python: str, folder: Path, format: str, head_format: str, report: Callable[[str], None]
) -> tuple[Path, Path]:
    """Return the folders of target and head; convert the models unless that was done. PeerError if that fails."""
    made = folder / digest(None, [model_folder(), HEAD], [])
    found = []
    for name, checkpoint, kind in (("target", model_folder(), format), ("head", HEAD, head_format)):
        out = made / f"{name}-{kind}"
        if not out.is_dir():
            report(f"openvino: converting {checkpoint} to {kind}")
            part, log = made / f"part-{name}", made / f"{name}-{kind}.log"
            shutil.rmtree(part, ignore_errors=True)
            made.mkdir(parents=True, exist_ok=True)
            command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", str(checkpoint)]
            command += ["--trust-remote-code"] if name == "head" else []  # optimum-intel's own code
            command += ["--task", "text-generation-with-past", "--weight-format", *WEIGHTS[kind], str(part)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            environment.pop("PYTHONPATH", None)
            with log.open("w", encoding="utf-8") as output:
                try:
                    subprocess.run(command, check=True, env=environment, stdout=output, stderr=output)
                except (OSError, subprocess.CalledProcessError) as error:
                    raise PeerError(f"openvino: the conversion of {checkpoint} failed; see {log}") from error
            part.rename(out)
        found.append(out)
    return found[0], found[1]
