"""Logs as JSON lines, in every process, where ``SERVE_APP_LOG=json``; without it logging stays as it is.

Each line has ``time``, ``level``, ``process``, ``pid``, ``logger`` and ``message``, and within a request
``request_id`` and ``trace_id``. Messages are written by this program and hold no prompt. What an exception says may
quote one, so only its type and where it was raised are told, unless ``SERVE_APP_LOG_CONTENT=true``. Keys and passwords
are taken out of whatever is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

# Ids of the request at hand and of its trace, where a process has them from elsewhere.
at_hand: ContextVar[tuple[str, str]] = ContextVar("at_hand", default=("", ""))
# What Ray, Serve and we log to; everything else goes to the root.
_LOGGERS = ("ray", "ray.serve")
# The innermost frames of an exception that are told.
_FRAMES = 8
_SECRET = re.compile(
    r"(?i)\b((?:api[_-]?key|password|secret|token|authorization)[\"']?\s*[=:]\s*[\"']?(?:bearer\s+|basic\s+)?|bearer\s+)"
    r"[^\s\"',;&]{6,}"
)
_IN_URL = re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]+@")


def as_json() -> bool:
    return os.environ.get("SERVE_APP_LOG") == "json"


def set_up(process: str, ids: Callable[[], tuple[str, str]] = at_hand.get) -> None:
    """Has this process, which is called ``process``, log as its environment says. ``ids``: of the request at hand and
    its trace; "" for none.
    """
    if not as_json():
        return
    lines = JsonLines(process, ids)
    for name in _LOGGERS:
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(lines)
            # Serve's writes to a file behind a buffer.
            if (target := getattr(handler, "target", None)) is not None:
                target.setFormatter(lines)
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler(sys.stderr))
    for handler in root.handlers:
        handler.setFormatter(lines)
    logging.captureWarnings(True)


def write(process: str, text: str, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """One line of a process whose output is its log: JSON, or the text as it is."""
    if as_json():
        text = JsonLines(process).format(logging.LogRecord("serve_app", level, "", 0, text.strip(), None, None))
    print(text, file=stream or sys.stdout, flush=True)


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, process: str, ids: Callable[[], tuple[str, str]] = at_hand.get) -> None:
        super().__init__()
        self._process = process
        self._ids = ids
        self._content = os.environ.get("SERVE_APP_LOG_CONTENT", "").lower() in ("1", "true", "yes")

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        request_id, trace_id = self._ids()
        if request_id:
            line |= {"request_id": request_id, "trace_id": trace_id or request_id}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line["error"] = self._error(error)
        return json.dumps(line, ensure_ascii=False)

    def _error(self, error: BaseException) -> dict[str, Any]:
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        told: dict[str, Any] = {"type": type(error).__qualname__}
        # What the system says of files and connections quotes nobody.
        if self._content or isinstance(error, OSError):
            told["message"] = without_secrets(str(error))
        told["at"] = [f"{os.path.relpath(f.filename)}:{f.lineno} {f.name}" for f in frames]
        if (cause := error.__cause__) is not None:
            told["cause"] = type(cause).__qualname__
        return told


def without_secrets(text: str) -> str:
    """``text`` with keys, and passwords of URLs, taken out."""
    return _IN_URL.sub(r"\1:...@", _SECRET.sub(r"\1...", text))
