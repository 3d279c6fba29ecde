"""The folder that is kept for this user: compiled engines, and data that was read from files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trtspec.errors import ConfigError

FOLDER_VARIABLE = "TRTSPEC_CACHE"
OFF = "off"
FILLING = "filling-"
"""Prefix of folders that a process fills; who finds one that is an hour old may remove it."""
GGUF = "gguf-"
"""Prefix of the folders that stand for GGUF files."""
LOCK = ".lock"
"""File in an engine's or a GGUF file's folder. All processes that use the folder hold it, shared.

Its time of change is the last use.
"""
POLL = 0.05  # seconds between two attempts to lock


def cache_folder() -> Path | None:
    """Folder that TRTSPEC_CACHE names, else one in the user's cache; None for "off".

    Raises OSError if the user has no home folder and names no folder.
    """
    named = os.environ.get(FOLDER_VARIABLE, "")
    if named == OFF:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(named or f"{home}/trtspec").expanduser().absolute()
    except RuntimeError as error:
        raise FileNotFoundError(f"{home}: {error}") from error


def make_private(folder: Path) -> None:
    """Make the folder, or raise ConfigError unless an existing one is private. OSError if it cannot be made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        check_private(folder)


def check_private(folder: Path) -> None:
    """Raise ConfigError unless this user owns the folder and nobody else can access it: its content is run as code."""
    found = folder.lstat()
    why = None
    if not stat.S_ISDIR(found.st_mode):
        why = "is a link" if stat.S_ISLNK(found.st_mode) else "is no folder"
        remedy = f"remove it, or set {FOLDER_VARIABLE} to another folder"
    elif found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, this process runs as user {os.geteuid()}"
        remedy = f"set {FOLDER_VARIABLE} to a folder of your own"
    elif found.st_mode & 0o077:
        why = f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
        remedy = f"if nobody else wrote to it, chmod 700 {folder}, else remove it"
    if why is not None:
        raise ConfigError(f"the cache of engines {folder} {why}, and it holds code that is run; {remedy}")
