"""app.logs: one short JSON object a line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from app.logs import JsonLines


def line_of(message: str, *arguments: object, **extra: object) -> dict[str, object]:
    record = logging.LogRecord("encoderd", logging.INFO, __file__, 1, message, arguments, None)
    record.__dict__.update(extra)
    return dict(json.loads(JsonLines().format(record)))


def test_a_line_is_one_json_object_with_its_fields() -> None:
    line = line_of("GET %s", "/livez", fields={"status": 200})
    assert (line["level"], line["logger"], line["msg"]) == ("info", "encoderd", "GET /livez")
    assert line["status"] == 200


def test_a_line_break_in_a_message_starts_no_new_line() -> None:
    record = logging.LogRecord("encoderd", logging.INFO, __file__, 1, "a\n%s", ("b\r\nforged",), None)
    assert len(JsonLines().format(record).splitlines()) == 1


def test_a_long_message_is_cut() -> None:
    assert len(str(line_of("x" * 5_000_000)["msg"])) == 1024


def test_an_exception_is_named_with_its_place() -> None:
    try:
        raise KeyError("oops")
    except KeyError:
        record = logging.LogRecord("encoderd", logging.ERROR, __file__, 1, "bad", None, sys.exc_info())
    line = json.loads(JsonLines().format(record))
    assert line["error"] == "KeyError: 'oops'"
    assert line["at"].startswith("test_logs.py:")


def test_a_library_that_would_log_a_fetched_url_says_nothing() -> None:
    program = (
        "import logging; from app.logs import set_up; set_up('debug');"
        "logging.getLogger('httpx').info('HTTP Request: GET http://media.example/?token=secret')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stderr == b""
