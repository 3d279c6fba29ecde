"""Settings with which the server starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtspec.errors import ConfigError
from trtspec.serve.logs import FORMATS, LEVELS


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of a server. Raises ConfigError naming the field.

    model: checkpoint or engine folder. served_name: the model's name for clients; None = the folder's name.
    api_keys: any of them opens /v1; none = open to all who reach the address. max_queue: number of samples that may
    wait in addition to those that run; further requests get 429. max_body: bytes.
    timeout: seconds for a request that names none. client_timeout: seconds for a client to send a body, and to take
    each 64 KiB of an answer. engine_timeout: seconds; an engine that has work and sends no message for so long is
    replaced. Loading the model does not count, but the first steps and the compilation of grammars do.
    drain: seconds for requests in flight to finish when the server is told to stop. cors: origins from which browsers
    may call. log_format: "text" or "json". log_level: one of trtspec.serve.logs.LEVELS.
    disable_log_stats: True = no line of acceptance and throughput every 10 seconds.
    """

    model: str
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 8 << 20
    timeout: float = 600.0
    client_timeout: float = 60.0
    engine_timeout: float = 300.0
    drain: float = 30.0
    cors: tuple[str, ...] = ()
    log_format: str = "text"
    log_level: str = "info"
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port = {self.port}; use 0..65535 (0 = any that is free)")
        least = {"max_queue": 0, "max_body": 1024, "drain": 0}
        for name in ("max_queue", "max_body", "timeout", "client_timeout", "engine_timeout", "drain"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least.get(name, 0.001)):
                raise ConfigError(f"{name} = {value} must be {least.get(name, 0.001)} or more, and finite")
        if self.log_format not in FORMATS or self.log_level not in LEVELS:
            raise ConfigError(
                f"log_format = {self.log_format!r}, log_level = {self.log_level!r}; "
                f"use one of {', '.join(FORMATS)}, and one of {', '.join(LEVELS)}"
            )
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII, and not empty (--api-key, TRTSPEC_API_KEY)")
