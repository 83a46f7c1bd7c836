"""What tool parsers have in common: pieces of calls, and readers of one call at a time."""

from __future__ import annotations

import enum
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_decoder = json.JSONDecoder(strict=False)


@dataclass(slots=True)
class CallPiece:
    """Part of tool call number ``call``. The first part has the name; all have more of the arguments' JSON text."""

    call: int
    id: str
    name: str = ""
    arguments: str = ""
    last: bool = False


class ToolParser:
    """Splits a stream of text into text and pieces of tool calls.

    ``tools``: those the request offers, ``{"type": "function", "function": {...}}``; where there are some, a call of
    any other is none. What looks like a call and is none comes out as the text it is. A call whose arguments turn out
    broken, or are cut, keeps them as the model wrote them: what was shown cannot be taken back, and the caller can tell
    the model.
    """

    # Control tokens that the detokenizer must not hide from the parser.
    markers: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._known = frozenset(self._tools) or None
        self._held = ""
        self._calls = 0

    def feed(self, text: str) -> list[str | CallPiece]:
        """Text and parts of calls that are certain now, in order."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> list[str | CallPiece]:
        """The rest, now that no more text comes."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[str | CallPiece]:
        raise NotImplementedError

    @staticmethod
    def cut(reader: CallParser) -> list[str | CallPiece]:
        """The end of a call that was cut."""
        piece, _, _ = reader.read("", True)
        return [piece] if piece is not None and piece.last else []


class Verdict(enum.Enum):
    MORE = 0  # the text goes on
    DONE = 1  # the call is complete; what follows it is not its business
    NO_CALL = 2  # said before the first piece only: the characters taken are text


class CallParser(Protocol):
    """Reads one call. ``started``: a piece was given, so it is a call whatever follows."""

    started: bool

    def read(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        """The next piece, how many characters of ``text`` it took, and how things stand."""
        ...


@dataclass(slots=True)
class Growing:
    """A call that grows: its id, and whether its name was told."""

    call: int
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def piece(self, name: str = "", arguments: str = "", *, last: bool = False) -> CallPiece:
        return CallPiece(self.call, self.id, name, arguments, last)


def json_at(text: str) -> tuple[Any, int | None]:
    """The JSON value at the start of ``text`` after white space, and where it ends; None without a whole one."""
    lead = len(text) - len(text.lstrip())
    try:
        return _decoder.raw_decode(text, lead)
    except (ValueError, RecursionError):
        return None, None


def json_text(value: Any) -> str:
    """``value`` as JSON text. ValueError for what JSON has no words for.

    A lone surrogate, which a model can write as an escape, stays an escape: as a character it could not be sent.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return text


def whole_call(value: Any, *keys: str) -> tuple[str, str] | None:
    """``{"name", "arguments": {...}}`` as name and JSON text; arguments may be JSON text, and may be missing."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        arguments = json_at(arguments)[0] if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return value["name"], json_text(arguments)
    except ValueError:
        return None


def prefix_at_end(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
