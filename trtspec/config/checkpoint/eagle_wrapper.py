"""vLLM's wrapper around an EAGLE head's config.json: {"model_type": "eagle", "model": {a plain config}}."""

from __future__ import annotations

from trtspec.config.checkpoint.reader import Reader


def unwrapped(read: Reader) -> Reader:
    """Return the plain config inside a wrapped one; any other config as it is.

    As in vLLM, fields next to `model` win over those in it, except for those that say what it is. There, model_type
    stays, and an architecture A becomes EagleA. Raises CheckpointError if `model` is no object.
    """
    if read.get("model_type") != "eagle":
        return read
    inner = read.object("model")
    if inner is None:
        raise read.error("model", "is missing; a config of model_type 'eagle' holds the head's own config there")
    outer = {key: value for key, value in read.data.items() if key not in ("model", "model_type", "architectures")}
    names = inner.get("architectures")
    if isinstance(names, list):
        names = [f"Eagle{name}" if "Eagle" not in str(name) else name for name in names]
    merged = {**inner, **{key: value for key, value in outer.items() if value is not None}, "architectures": names}
    return Reader(merged, read.file, read.role)
