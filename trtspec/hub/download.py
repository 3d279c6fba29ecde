"""Download of models from the Hugging Face Hub: a snapshot of a revision in huggingface_hub's own cache.

It fetches only configs, tokenizers, templates and weights in safetensors or GGUF: no file that runs code when it is
loaded. huggingface_hub's settings apply: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS.
"""

from __future__ import annotations

import glob
import ipaddress
import logging
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trtspec.errors import CheckpointError, ConfigError, DependencyError

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Form of a name on the Hub: owner/model."""
_TEXTS = ("*.json", "tokenizer.model", "*.jinja")
_FOLDER_OF_TEMPLATES = "additional_chat_templates/"
_WEIGHTS, _GGUF = "*.safetensors", "*.gguf"


def snapshot(name: str, role: str, revision: str | None = None) -> Path:
    """Folder with a model's files, which are downloaded if they are not on this machine.

    role: the model's name in errors ("target", "draft"). revision: a branch, tag or commit; None = main.
    Raises DependencyError without huggingface_hub. Raises CheckpointError for a model or revision that does not exist,
    is not granted or cannot be fetched. Raises ConfigError if a token would be sent without encryption.
    """
    what = f"{role} model {name!r}" + (f" at revision {revision!r}" if revision else "")
    hub = _hub(what)
    _check_endpoint(hub)
    try:
        if hub.constants.HF_HUB_OFFLINE:
            # The other files are checked when they are read: the library would require files that are never fetched.
            some = ["config.json"]
            folder = Path(hub.snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=some))
        else:
            found = hub.HfApi().model_info(name, revision=revision)
            names = wanted_files((sibling.rfilename for sibling in found.siblings or ()), what)
            patterns = [glob.escape(one) for one in names]
            folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:
        _say(hub, error, what, name)
    except Exception as error:  # the HTTP library's errors are not OSError in all versions
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        _say(hub, error, what, name)
    _check_links(folder, what)
    logger.info("%s: commit %s in %s", what, folder.name, folder)
    return folder


def wanted_files(names: Iterable[str], what: str) -> list[str]:
    """Names of a model's files that are fetched: texts, and weights in safetensors, else a single GGUF file.

    Raises CheckpointError if there are several GGUF files and no weights in safetensors.
    """
    every = [name for name in names if "/" not in name or _is_template(name)]
    weights = [name for name in every if fnmatch(name, _WEIGHTS)]
    if not weights:
        weights = [name for name in every if fnmatch(name, _GGUF)]
        if len(weights) > 1:
            raise CheckpointError(
                f"{what} has several GGUF files ({', '.join(sorted(weights))}); download the one you want and pass its "
                "path"
            )
    texts = [name for name in every if any(fnmatch(name, pattern) for pattern in _TEXTS)]
    return sorted({*texts, *weights})


def _is_template(name: str) -> bool:
    rest = name.removeprefix(_FOLDER_OF_TEMPLATES)
    return rest != name and "/" not in rest and rest.endswith(".jinja")


def _hub(what: str) -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise DependencyError(
            f"{what} is no folder on this machine, and names on the Hub need huggingface_hub ({error}); "
            "pip install 'trtspec[hub]', or pass a folder"
        ) from error
    return huggingface_hub


def _check_endpoint(hub: Any) -> None:
    """Raise ConfigError if a token would leave this machine without encryption."""
    endpoint = urlsplit(hub.constants.ENDPOINT)
    if endpoint.scheme == "https" or _is_loopback(endpoint.hostname or "") or hub.get_token() is None:
        return
    raise ConfigError(
        f"HF_ENDPOINT = {hub.constants.ENDPOINT!r} is not encrypted, and the token of HF_TOKEN or `hf auth login` "
        "would be sent to it; use https, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1 and unset HF_TOKEN"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _say(hub: Any, error: Exception, what: str, name: str) -> NoReturn:
    """Raise CheckpointError that says what went wrong and what to do."""
    errors, offline = hub.errors, hub.constants.HF_HUB_OFFLINE
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        problem = "is neither a folder here nor a model on the Hub"
        remedy = "check the name; a private model wants a login (hf auth login, or HF_TOKEN)"
    elif isinstance(error, errors.GatedRepoError) or status in (401, 403):
        problem = "is not granted to you"
        remedy = f"accept its terms at {hub.constants.ENDPOINT}/{name} and log in (hf auth login, or HF_TOKEN)"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem, remedy = "does not exist", "name a branch, tag or commit of the model"
    elif offline and isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        problem = "is not on this machine, and HF_HUB_OFFLINE is set"
        remedy = "unset it, or download the model first (hf download)"
    else:
        problem = "cannot be fetched"
        remedy = "try again: what is there already is kept. If all of it is there, HF_HUB_OFFLINE=1 asks for nothing"
    raise CheckpointError(f"{what} {problem} ({reason}); {remedy}") from error


def _check_links(folder: Path, what: str) -> None:
    """Raise CheckpointError unless a snapshot's files lead to the model's own folder: to blobs/, next to snapshots/."""
    home = folder.parent.parent.resolve()
    for file in folder.rglob("*"):
        if home not in file.resolve().parents:
            raise CheckpointError(f"{what}: {file} is a link to {file.resolve()}; remove {home} and download it again")
