"""Structured logs: text on a terminal, JSON otherwise, with the id of the request at hand on every record."""

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "taskName"}


def configure_logging(service: str, level: LogLevel = "info", format: LogFormat = "auto") -> None:
    """Send all of this process' logs to standard error. Extra fields of a record (`extra={…}`) are kept."""
    handler = logging.StreamHandler(sys.stderr)
    text = format == "text" or (format == "auto" and sys.stderr.isatty())
    handler.setFormatter(TextFormatter(service) if text else JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`12:00:01 scheduler INFO  trivet_scheduler.server: ready [request abc] key=value`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{when} {self._service:<9} {record.levelname:<7} {record.name}: {record.getMessage()}"
        if request_id.get():
            line += f" [request {request_id.get()}]"
        line += "".join(f" {key}={value}" for key, value in _extras(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


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
        if request_id.get():
            entry["request_id"] = request_id.get()
        entry.update(_extras(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
