"""All errors that a caller can meet. Each message says what is wrong, with the bad value, and what to do about it."""

from __future__ import annotations


class TrtSpecError(Exception):
    """Base of all errors raised on purpose by trtspec."""


class ConfigError(TrtSpecError, ValueError):
    """A setting is wrong, or two settings contradict each other. The message names field, value and remedy."""


class CheckpointError(TrtSpecError, ValueError):
    """A checkpoint folder cannot be used: a file is missing, damaged, or of a kind that is refused."""


class WeightsError(CheckpointError):
    """Tensors are missing, unexpected or mis-shaped. The message names model (target or draft), tensors and shapes."""


class UnsupportedError(TrtSpecError, NotImplementedError):
    """A known feature is not built (for this mode, architecture or backend). It is never silently ignored."""


class RequestError(TrtSpecError, ValueError):
    """One request is invalid (empty prompt, token id out of range, too long, bad sampling value). Others go on."""


class CapacityError(TrtSpecError, RuntimeError):
    """A request or a batch can never fit the KV cache or the engine's limits. The message says by how much."""


class DependencyError(TrtSpecError, ImportError):
    """An optional dependency is missing. The message holds the command that installs it."""


class EngineError(TrtSpecError, RuntimeError):
    """The engine failed or was shut down while a request was in flight."""


class DeviceError(EngineError):
    """The device failed. Nothing can run on it any more, whatever the cause."""
