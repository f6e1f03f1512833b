"""One JSON object a line on standard error, at most 1 KiB each. Media and query strings are never logged."""

import logging
import sys
import time
from typing import Final

import msgspec

MAX_LINE_BYTES: Final = 1024
LEVELS: Final = ("debug", "info", "warning", "error")
LIBRARIES_THAT_LOG_URLS: Final = ("httpx", "httpcore")  # whole, with the query string, at level info


class JsonLines(logging.Formatter):
    """{"ts", "level", "logger", "msg"} and the traceback's last line, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage()[:MAX_LINE_BYTES],
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"[:256]
            fields["at"] = _where(record)
        fields.update(getattr(record, "fields", {}))
        return msgspec.json.encode(fields).decode()


def _where(record: logging.LogRecord) -> str:
    traceback = record.exc_info[2] if record.exc_info else None
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    code = traceback.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} {code.co_name}"


def set_up(level: str) -> None:
    """Send every logger of the process to standard error. Called once, by the process's entry."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in LIBRARIES_THAT_LOG_URLS:
        logging.getLogger(library).setLevel(logging.WARNING)


class RequestNote:
    """What one request's log line says beside method, path and status. Filled by whoever knows."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started_ns = time.monotonic_ns()
        self.req_id = ""
        self.fields: dict[str, object] = {}

    def log(self, method: str, path: str, status: int) -> None:
        """The line."""
        total_ms = (time.monotonic_ns() - self.started_ns) / 1e6
        line = {
            "request_id": self.request_id,
            "req_id": self.req_id[:128],
            "status": status,
            "total_ms": round(total_ms, 3),
            **self.fields,
        }
        logging.getLogger("encoderd.request").info("%s %s", method, path[:128], extra={"fields": line})
