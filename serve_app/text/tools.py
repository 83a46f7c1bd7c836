"""Tool calls in the text of a model, in the formats the open models were trained on.

``hermes``   <tool_call>{"name": ..., "arguments": {...}}</tool_call>            Hermes, Qwen, pico
``llama3``   {"name": ..., "parameters": {...}}, possibly several split by ";"    Llama 3.1 and later
``mistral``  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}

Text before a call flows on; a call is held until it is complete and then given as one piece. What looks like
a call and is none comes out as the text it is.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_decoder = json.JSONDecoder()


@dataclass(slots=True)
class ToolCall:
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolParser:
    """Splits a stream of text into text and tool calls. A format is a ``marker`` and a way to read what
    follows it."""

    # Control tokens that the detokenizer must not hide from the parser.
    markers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Text and calls that are certain now, in order."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> list[str | ToolCall]:
        """The rest, now that no more text comes."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[str | ToolCall]:
        raise NotImplementedError


class _Marked(ToolParser):
    """Formats in which a marker announces the call. White space around calls belongs to nobody and is
    dropped."""

    marker: str

    def __init__(self) -> None:
        super().__init__()
        self._after_call = False

    def _read(self, *, final: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        while self._held:
            start = self._held.find(self.marker)
            if start < 0:
                self._text(out, self._held if final else self._certain(self._held), final)
                break
            calls, end = self._calls(self._held[start:], final)
            if calls is None and not final and end == 0:
                self._text(out, self._held[:start].rstrip(), False)
                break
            if calls is None:
                # Not a call: its text, up to where the attempt ended, is text like any other.
                self._text(out, self._held[: start + end], True)
                continue
            before = self._held[:start].rstrip()
            if before:
                out.append(before.lstrip() if self._after_call else before)
            out.extend(calls)
            self._held = self._held[start + end :]
            self._after_call = True
        return out

    def _text(self, out: list[str | ToolCall], text: str, final: bool) -> None:
        """Moves ``text``, the beginning of what is held, to ``out``."""
        self._held = self._held[len(text) :]
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if text:
            out.append(text)

    def _certain(self, text: str) -> str:
        """``text`` without an end that may be the beginning of a marker, and without white space before
        that."""
        for size in range(min(len(self.marker) - 1, len(text)), 0, -1):
            if self.marker.startswith(text[-size:]):
                text = text[:-size]
                break
        return text.rstrip()

    def _calls(self, text: str, final: bool) -> tuple[list[ToolCall] | None, int]:
        """The calls at the start of ``text`` (which begins with the marker) and how many characters they
        take.

        ``(None, 0)``: not complete yet. ``(None, n)``: no call; the first n characters are text.
        """
        raise NotImplementedError


class Hermes(_Marked):
    marker = "<tool_call>"
    close = "</tool_call>"
    markers = (marker, close)

    def _calls(self, text: str, final: bool) -> tuple[list[ToolCall] | None, int]:
        body = text[len(self.marker) :]
        value, end = _json_at(body)
        if end is None:
            # A closing tag outside a string means that the JSON is broken for good; inside one it is an
            # argument.
            close = text.find(self.close)
            while close >= 0 and _in_string(text[len(self.marker) : close]):
                close = text.find(self.close, close + 1)
            if close >= 0:
                return None, close + len(self.close)
            return None, len(text) if final else 0
        call = _call_of(value, "arguments", "parameters")
        rest = body[end:].lstrip()
        taken = len(self.marker) + end + (len(body) - end - len(rest))
        if rest.startswith(self.close):
            taken += len(self.close)
            return ([call], taken) if call else (None, taken)
        if final or not self.close.startswith(rest[: len(self.close)]):
            # Models often stop without the closing tag.
            return ([call], taken) if call else (None, taken)
        return None, 0


class Mistral(_Marked):
    marker = "[TOOL_CALLS]"
    args = "[ARGS]"
    markers = (marker, args)

    def _calls(self, text: str, final: bool) -> tuple[list[ToolCall] | None, int]:
        body = text[len(self.marker) :]
        stripped = body.lstrip()
        lead = len(text) - len(stripped)
        if stripped and not stripped.startswith("["):
            name, found, rest = stripped.partition(self.args)
            if not found:
                return None, len(text) if final else 0
            value, end = _json_at(rest)
            if end is None:
                return None, len(text) if final else 0
            call = _call_of({"name": name.strip(), "arguments": value}, "arguments")
            taken = lead + len(name) + len(found) + end
            return ([call], taken) if call else (None, taken)
        value, end = _json_at(stripped)
        if end is None:
            return None, len(text) if final else 0
        calls = [_call_of(item, "arguments", "parameters") for item in value] if isinstance(value, list) else [None]
        whole = [call for call in calls if call is not None]
        return (whole, lead + end) if whole and len(whole) == len(calls) else (None, lead + end)


class Llama3(ToolParser):
    """The whole answer is calls, or it is text: decided by its first character."""

    tag = "<|python_tag|>"
    markers = (tag,)

    def __init__(self) -> None:
        super().__init__()
        self._plain = False
        self._called = False

    def _read(self, *, final: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        while self._held and not self._plain:
            body = self._held.lstrip("; \r\n\t") if self._called else self._held.lstrip()
            if not body or (self.tag.startswith(body) and not final):
                break
            inner = body.removeprefix(self.tag).lstrip()
            if not inner and not final:
                break
            if not inner.startswith("{"):
                self._plain = True
                break
            value, end = _json_at(inner)
            call = _call_of(value, "parameters", "arguments") if end is not None else None
            if call is not None and end is not None:
                out.append(call)
                self._called = True
                self._held = inner[end:]
                continue
            self._plain = end is not None or final
            break
        if self._plain or final:
            # Separators belong to the calls before them; what follows is text, told as it is.
            rest = self._held.lstrip("; \r\n\t") if self._called else self._held
            if rest:
                out.append(rest)
                self._called = False
            self._held = ""
        return out


def _json_at(text: str) -> tuple[Any, int | None]:
    """The JSON value at the start of ``text`` after white space, and where it ends; None where there is no
    whole one."""
    lead = len(text) - len(text.lstrip())
    try:
        value, end = _decoder.raw_decode(text, lead)
    except (ValueError, RecursionError):
        return None, None
    # A number or a word at the very end may go on; calls are objects and arrays, which close.
    return value, end


_escaped = re.compile(r"\\.", re.DOTALL)


def _in_string(text: str) -> bool:
    """Whether the end of ``text``, the beginning of a JSON value, lies inside a string."""
    return _escaped.sub("", text).count('"') % 2 == 1


def _call_of(value: Any, *keys: str) -> ToolCall | None:
    """``{"name", "arguments": {...}}`` as a call; arguments may be JSON text, and may be missing."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": Hermes,
    "pico": Hermes,
    "llama3": Llama3,
    "mistral": Mistral,
}
