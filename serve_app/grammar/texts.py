"""Strings of a JSON schema as text without quotes, for formats that write them so: terminals in llguidance's Lark."""

from __future__ import annotations

from typing import Any

from llguidance import regex_to_lark

from serve_app.grammar import GrammarError
from serve_app.grammar.rules import choice_rule

_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-9]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# As good as without a limit.
_LONGEST = 10**9
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
# By RFC 3339, 791, 1123, 5321 and 4122; nothing that they forbid, and what people write of what they allow.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "email": rf"[A-Za-z0-9_+\-]+(?:\.[A-Za-z0-9_+\-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}


def text_terms(schema: dict[str, Any]) -> list[str]:
    """What a string of ``schema`` has to match, all of it; combined schemas aside. Raises :class:`GrammarError`."""
    terms = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        terms.append(choice_rule([value for value in values if isinstance(value, str)]))
    if isinstance(schema.get("pattern"), str):
        terms.append(f"/{regex_to_lark(searched(schema['pattern']), 'dw')}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        terms.append(f"/(?s:.{{{_count(least)},{'' if most is None else _count(most)}}})/")
    form = schema.get("format")
    if form is not None:
        if form not in FORMATS:
            raise GrammarError(
                f"the format {str(form)[:40]!r} of a string is not supported for a model that writes strings without "
                f"quotes; leave it out, or use a pattern or one of {', '.join(FORMATS)}"
            )
        terms.append(f"/{FORMATS[form]}/")
    return terms


def without(mark: str) -> str:
    """An expression for texts in which ``mark`` does not occur, which begins with "<" and has no other.

    Said this way, and not as the complement of those in which it occurs, it costs the lexer next to nothing beside
    other terms.
    """
    rest = ""
    for char in reversed(mark[1:]):
        other = rf"[^\x3c\x{{{ord(char):x}}}][^\x3c]*"
        rest = f"(?:{other}|\\x{{{ord(char):x}}}{rest})?" if rest else f"(?:{other})?"
    return rf"[^\x3c]*(?:\x3c{rest})*"


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or value % 1:
        raise GrammarError(f"{str(value)[:40]} is no length")
    return int(min(value, _LONGEST))


def searched(pattern: str) -> str:
    """An expression for the whole of texts in which ``pattern`` is found: anchors say where nothing may stand beside
    it, and those inside groups are none that can be said so."""
    found = []
    for option in _options(pattern):
        body = option.removeprefix("^")
        before = "" if body != option else "(?s:.*)"
        slashes = len(body) - len(body.removesuffix("$").rstrip("\\")) - 1
        after = "" if body.endswith("$") and slashes % 2 == 0 else "(?s:.*)"
        found.append(f"{before}(?:{body if after else body[:-1]}){after}")
    return "|".join(found)


def _options(pattern: str) -> list[str]:
    """The alternatives of an expression at its top level."""
    options, depth, in_class, at = [""], 0, False, 0
    while at < len(pattern):
        char = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        if in_class:
            in_class = char != "]" or options[-1].endswith(("[", "[^"))
        elif char == "[":
            in_class = True
        elif char in ("(", ")"):
            depth += 1 if char == "(" else -1
        at += len(char)
        if char == "|" and not depth and not in_class:
            options.append("")
        else:
            options[-1] += char
    return options
