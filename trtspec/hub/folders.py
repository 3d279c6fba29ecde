"""Finding the Hugging Face folder on this machine for a user's name or path of a model."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from trtspec.errors import ConfigError
from trtspec.gguf import SUFFIX
from trtspec.hub.download import HUB_NAME, snapshot


def checkpoint_folder(model: str | os.PathLike[str], role: str = "target", revision: str | None = None) -> Path:
    """Folder of a model: a folder unchanged, the folder that stands for a GGUF file, or the snapshot of a Hub name.

    A name on the Hub is owner/model. A file or folder on this machine takes precedence over the same name on the Hub.
    Anything else is returned as a path; the code that reads it then reports what is missing.
    role: the model's name in errors ("target", "draft"). revision: only for a name on the Hub.
    Raises what `gguf_folder` and `snapshot` raise, and ConfigError for a revision of a model on this machine.
    """
    found = lasting_path(model, role, revision)
    return _of_gguf(found, role) if found.suffix == SUFFIX and found.is_file() else found


def lasting_path(model: str | os.PathLike[str], role: str = "target", revision: str | None = None) -> Path:
    """Path of a model as for `checkpoint_folder`, but a GGUF file is that file: the cache may evict its folder."""
    path, name = Path(model), os.fspath(model)
    if path.is_dir() or path.is_file():
        if revision is not None:
            raise ConfigError(f"revision = {revision!r}, and {role} model {name!r} is on this machine; leave it unset")
        return path
    if isinstance(model, str) and HUB_NAME.fullmatch(name):
        return _of_hub(name, role, revision)
    return path


@functools.lru_cache(maxsize=64)
def _of_hub(name: str, role: str, revision: str | None) -> Path:
    """Folder or GGUF file of a name on the Hub; looked up once in a process, so all its code sees the same commit."""
    folder = snapshot(name, role, revision)
    files = sorted(folder.glob(f"*{SUFFIX}"))
    # A repository of one GGUF file may have a config.json that lacks most fields. The file has them all.
    return files[0] if len(files) == 1 and not any(folder.glob("*.safetensors")) else folder


def _of_gguf(file: Path, role: str) -> Path:
    from trtspec.hub.gguf_folder import gguf_folder  # so that a server without GGUF files starts without numpy

    return gguf_folder(file, role)
