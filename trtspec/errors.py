"""Every error a caller can meet. Each message says what is wrong, with the offending value, and what to do about it."""

from __future__ import annotations


class TrtSpecError(Exception):
    """Base of all errors raised on purpose by trtspec."""


class ConfigError(TrtSpecError, ValueError):
    """A setting is wrong, or two settings contradict each other. Names the field, the value and the remedy."""


class CheckpointError(TrtSpecError, ValueError):
    """A checkpoint folder cannot be used: a file is missing, damaged, or of a kind that is refused."""


class WeightsError(CheckpointError):
    """Tensors are missing, unexpected or mis-shaped. Names the model (target or draft), the tensors and the shapes."""


class UnsupportedError(TrtSpecError, NotImplementedError):
    """Known, but not built (for this mode, architecture or backend). Never silently ignored."""


class RequestError(TrtSpecError, ValueError):
    """One request is invalid (empty prompt, token id out of range, too long, bad sampling value); others go on."""


class CapacityError(TrtSpecError, RuntimeError):
    """A request or a batch can never fit the KV cache or the engine's limits. Says by how much."""


class DependencyError(TrtSpecError, ImportError):
    """An optional dependency is missing. The message holds the command that installs it."""


class EngineError(TrtSpecError, RuntimeError):
    """The engine failed or was shut down while a request was in flight."""


class DeviceError(EngineError):
    """The device failed: nothing can run on it any more, whoever is to blame."""
