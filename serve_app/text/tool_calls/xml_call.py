"""Reader of Qwen3-Coder's calls: ``<function=name><parameter=key>value</parameter>...</function>``.

Values are plain text; the tool's schema says which of them are not strings. Format: Qwen3-Coder's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, Growing, Verdict, json_at, json_text

OPEN = "<function="
_NAME = re.compile(r"<function=([^<>\n]{1,128})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = "</function>"


class XmlCall:
    """``tools``: functions by name. Arguments are told parameter by parameter; ``stop`` is the tag that closes the
    format."""

    def __init__(self, call: int, tools: Mapping[str, dict[str, Any]], *, stop: str) -> None:
        self.started = False
        self._growing = Growing(call)
        self._tools = tools
        self._stop = stop
        self._types: Mapping[str, Any] = {}
        self._count = 0

    def read(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        name, at = "", 0
        if not self.started:
            found = _NAME.match(text)
            if found is None:
                hopeless = final or ">" in text or "\n" in text or len(text) > len(OPEN) + 130
                return None, 0, Verdict.NO_CALL if hopeless else Verdict.MORE
            name, at = found[1].strip(), found.end()
            if self._tools and name not in self._tools:
                return None, at, Verdict.NO_CALL
            self.started = True
            types = self._tools.get(name, {}).get("parameters", {}).get("properties")
            self._types = types if isinstance(types, dict) else {}
        piece = self._growing.piece(name)
        while found := _PARAMETER.match(text, at):
            piece.arguments += self._pair(found[1].strip(), found[2])
            at = found.end()
        rest = text[at:].lstrip()
        ended = rest.startswith((_END, self._stop)) or (final and not rest.startswith("<parameter="))
        if rest.startswith(_END):
            at = len(text) - len(rest) + len(_END)
        if not ended and not final:
            return piece, at, Verdict.MORE
        if ended:
            piece.arguments += "}" if self._count else "{}"
        piece.last = True
        return piece, len(text) if final and not ended else at, Verdict.DONE

    def _pair(self, key: str, value: str) -> str:
        separator = ", " if self._count else "{"
        self._count += 1
        return f"{separator}{json_text(key)}: {self._typed(key, value)}"

    def _typed(self, key: str, value: str) -> str:
        declared = self._types.get(key)
        kind = declared.get("type") if isinstance(declared, dict) else None
        if kind == "string" or (kind is None and not value.lstrip().startswith(("{", "["))):
            return json_text(value)
        parsed, end = json_at(value)
        if end is None or value[end:].strip():
            parsed = {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
        try:
            return json_text(parsed)
        except ValueError:
            return json_text(value)
