"""From what users call a model to a Hugging Face folder on this machine."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from trtspec.errors import ConfigError
from trtspec.gguf import SUFFIX
from trtspec.hub.download import HUB_NAME, snapshot


def checkpoint_folder(model: str | os.PathLike[str], role: str = "target", revision: str | None = None) -> Path:
    """A folder as it is; of a GGUF file, the one that stands for it; of a name on the Hub, owner/model, its snapshot.
    What is here wins over what has the same name there. What is none of these comes back as a path, for whoever reads
    it to say what is missing.

    `role` ("target", "draft") is what errors call the model. revision: of a name on the Hub alone. Raises what
    `gguf_folder` and `snapshot` raise, ConfigError for a revision of what is here.
    """
    path, name = Path(model), os.fspath(model)
    if path.is_dir():
        found = path
    elif path.is_file():
        found = _of_gguf(path, role) if path.suffix == SUFFIX else path
    elif isinstance(model, str) and HUB_NAME.fullmatch(name):
        return _of_hub(name, role, revision)
    else:
        return path
    if revision is not None:
        raise ConfigError(f"revision = {revision!r}, and {role} model {name!r} is on this machine; leave it unset")
    return found


@functools.lru_cache(maxsize=64)
def _of_hub(name: str, role: str, revision: str | None) -> Path:
    """Asked for once in a process, so that all of it sees the same commit."""
    folder = snapshot(name, role, revision)
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob(f"*{SUFFIX}"))
    return _of_gguf(files[0], role) if len(files) == 1 else folder


def _of_gguf(file: Path, role: str) -> Path:
    from trtspec.hub.gguf_folder import gguf_folder  # a server that reads no file starts without numpy

    return gguf_folder(file, role)
