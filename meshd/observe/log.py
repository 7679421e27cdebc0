"""Structured logging on the standard library: every event is a name and fields, one line each.

Two forms: `console`, short, for people; `json`, one object a line, for machines. Set up once by the daemon;
everything else calls `event(logger, "link_lost", peer=..., reason=...)`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any, Literal

Format = Literal["console", "json"]

# What others write below this level is of no use to the operator of a peer: reconnects, requests, progress bars.
_THIRD_PARTY: Mapping[str, int] = {
    "hivemind": logging.ERROR,
    "p2pd": logging.ERROR,
    "grpc": logging.ERROR,
    "asyncio": logging.WARNING,
    "transformers": logging.ERROR,
    "huggingface_hub": logging.WARNING,
    "datasets": logging.WARNING,
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
    "httpcore": logging.WARNING,
    "urllib3": logging.WARNING,
    "filelock": logging.WARNING,
    "matplotlib": logging.WARNING,
}

# By number: libraries rename levels (hivemind makes WARNING "WARN") for the whole process.
_NAMES = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}
_SHORT = {10: "debug", 20: "info ", 30: "WARN ", 40: "ERROR", 50: "FATAL"}


def setup_logging(level: str = "info", form: Format = "console", stream: IO[str] | None = None) -> None:
    """Send all logging to `stream` (standard error when None) in `form`, from `level` (`debug` ... `error`) up.

    Call it before hivemind and transformers are imported: both read their level from the environment then. May be
    called again; the last call counts.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    quiet = {name: floor for name, floor in _THIRD_PARTY.items() if floor > root.level}
    for name in _THIRD_PARTY:
        logging.getLogger(name).setLevel(quiet.get(name, logging.NOTSET))
    os.environ.setdefault("HIVEMIND_LOGLEVEL", logging.getLevelName(_THIRD_PARTY["hivemind"]))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(True)


def event(
    logger: logging.Logger,
    name: str,
    /,
    *,
    level: int = logging.INFO,
    error: BaseException | None = None,
    **fields: object,
) -> None:
    """Log the event `name` (snake_case, stable: machines look for it) with `fields`.

    error: an exception that is a bug, logged with its traceback. What a user or a peer can cause goes into a field
    instead, as its text (one line per loss, C10).
    """
    if logger.isEnabledFor(level):
        # stacklevel 2: the record names the caller's line, not this one.
        logger.log(level, name, extra={"event_fields": fields}, exc_info=error, stacklevel=2)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record that `event` made; none for records of others."""
    fields: dict[str, Any] = getattr(record, "event_fields", {})
    return fields


class ConsoleFormatter(logging.Formatter):
    """`12:03:44 info  pipeline: link_lost peer=alpha reason="timed out"`: one line, local time, short logger name."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        level = _SHORT.get(record.levelno, record.levelname)
        parts = [clock, level, f"{_short_name(record.name)}:", _one_line(record.getMessage())]
        parts += [f"{name}={_shown(value)}" for name, value in fields_of(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "event": ..., FIELDS}`: time in UTC, ISO 8601 with milliseconds.

    Values that JSON has no form for are written as their text. A field never hides one of the four names.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _NAMES.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for name, value in fields_of(record).items():
            entry[f"field_{name}" if name in entry else name] = value
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _short_name(name: str) -> str:
    return name.removeprefix("meshd.") or name


def _one_line(text: str) -> str:
    return text.replace("\r", "").replace("\n", "\\n")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=') else text
