"""The server's log on stderr: one line per event, as text or as JSON, whatever the event contains."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


def configure(log_format: str, level: str, stream: TextIO | None = None) -> None:
    """Send all of this process's log to a stream (stderr by default), instead of its former destination.

    log_format: one of FORMATS. level: one of LEVELS, the lowest that is written.
    A logging call passes an event's own fields as `extra={"fields": {...}}`, with JSON values.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def one_line(text: str) -> str:
    """Return a text whose non-printable characters are written as escapes such as \\n, \\x1b, \\u2028.

    Such a character could end a line, move a terminal's cursor or change its colours.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class JsonFormatter(logging.Formatter):
    """A formatter of events as JSON objects:

    {"time": "2026-01-31T12:00:00.123Z", "level", "logger", "message", [fields], ["exception": "traceback"]}.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        event: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        # JSON escapes control characters; ensure_ascii escapes the others that could end a line (U+2028)
        return json.dumps(event, ensure_ascii=True, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """A formatter of events as `time LEVEL logger message key=value ...`.

    A traceback follows on lines of its own, which begin with `    | `.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of text, and one line for each line of a traceback."""
        words = [_time(record), record.levelname, record.name, record.getMessage()]
        words += [f"{name}={_plain(value)}" for name, value in _fields(record).items()]
        lines = [one_line(" ".join(words))]
        if record.exc_info:
            lines += ["    | " + one_line(line) for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


def _plain(value: Any) -> str:
    """Text of a field's value; a string that is empty or contains a blank, an equals sign or a quote is quoted."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return json.dumps(text) if isinstance(value, str) and (not text or set(text) & set(' ="')) else text


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
