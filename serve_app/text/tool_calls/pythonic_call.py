"""Reader of calls written as Python: ``add(a=1, b=["x", None])``. Literals only; nothing is evaluated."""

from __future__ import annotations

import ast
import re
from typing import Any

from serve_app.text.tool_calls.base import CallPiece, Growing, Verdict, json_text

_HEAD = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
_MAYBE_HEAD = re.compile(r"\s*([A-Za-z_][\w.]{0,127}\s*)?")
_MARKS = re.compile(r"""["'()\[\]{}\\]""")
_MAX_CHARS = 64 * 1024
_MAX_DEPTH = 32
_WORDS = {"true": True, "false": False, "null": None}


class PythonicCall:
    """One call, told once it is complete. ``known``: names that count; None for any."""

    def __init__(self, call: int, known: frozenset[str] | None = None) -> None:
        self.started = False
        self._growing = Growing(call)
        self._known = known

    def read(self, text: str, final: bool) -> tuple[CallPiece | None, int, Verdict]:
        head = _HEAD.match(text)
        if head is None:
            possible = _MAYBE_HEAD.fullmatch(text) is not None and not final
            return None, 0, Verdict.MORE if possible else Verdict.NO_CALL
        if self._known is not None and head[1] not in self._known:
            return None, 0, Verdict.NO_CALL
        end = _closing(text, head.end())
        if end == 0 and not final and len(text) <= _MAX_CHARS:
            return None, 0, Verdict.MORE
        arguments = _arguments(text[head.end() : end]) if 0 < end <= _MAX_CHARS else None
        if arguments is None:
            return None, 0, Verdict.NO_CALL
        self.started = True
        return self._growing.piece(head[1], arguments, last=True), end + 1, Verdict.DONE


def _closing(text: str, at: int) -> int:
    """Where the bracket opened before ``at`` closes: 0 for not yet, -1 for never."""
    depth = 1
    quote = ""
    while found := _MARKS.search(text, at):
        char, at = found.group(), found.end()
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
            if depth > _MAX_DEPTH:
                return -1
        elif char != "\\":
            depth -= 1
            if depth == 0:
                return at - 1 if char == ")" else -1
    return 0


def _arguments(source: str) -> str | None:
    try:
        call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        values = {str(k.arg): _literal(k.value) for k in call.keywords}
        return json_text(values)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value  # type: ignore[operator]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be strings")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    raise ValueError(f"{type(node).__name__} is no literal")
