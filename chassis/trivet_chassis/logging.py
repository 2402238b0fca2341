"""Structured logs: text on a terminal, JSON otherwise, with the id of the request at hand on every record.

What users send may end up in a message: control characters are escaped, so that nobody forges a line or drives a terminal.
"""

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]
WrittenFormat = Literal["text", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "taskName"}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_TRACE_INDENT = "\n    "


def configure_logging(service: str, level: LogLevel = "info", format: LogFormat = "auto") -> WrittenFormat:
    """Send all of this process' logs to standard error; returns how. Extra fields of a record (`extra={…}`) are kept."""
    handler = logging.StreamHandler(sys.stderr)
    text = format == "text" or (format == "auto" and sys.stderr.isatty())
    handler.setFormatter(TextFormatter(service) if text else JsonFormatter(service))
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # gRPC's core writes lines of its own to standard error, at start and for every peer that goes; only its errors are of use.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return "text" if text else "json"


class TextFormatter(logging.Formatter):
    """`12:00:01 scheduler INFO    trivet_scheduler.server: ready [request abc] key=value`; further lines are indented."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{when} {self._service:<9} {record.levelname:<7} {record.name}: {record.getMessage()}"
        request = _request_of(record)
        if request:
            line += f" [request {request}]"
        line += "".join(f" {key}={value}" for key, value in _extras(record).items())
        for trace in _traces(self, record).values():
            line += "\n" + trace
        return line.translate(_ESCAPES).replace("\n", _TRACE_INDENT)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = _request_of(record)
        if request:
            entry["request_id"] = request
        entry |= _traces(self, record)
        entry = _extras(record) | entry  # an extra field never hides what the line says of itself
        try:
            return msgspec.json.encode(entry, enc_hook=str).decode()
        except (TypeError, ValueError, OverflowError):  # half a surrogate pair, a key that is no text, an endless number
            return json.dumps({str(key): value for key, value in entry.items()}, default=str, skipkeys=True)


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True


def _request_of(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "") or request_id.get())


def _traces(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, str]:
    traces = {}
    if record.exc_info:
        traces["exception"] = formatter.formatException(record.exc_info)
    if record.stack_info:
        traces["stack"] = formatter.formatStack(record.stack_info)
    return traces


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
