"""What a forced answer looks like in each family's format of tool calls: the other side of their parsers.

A family is a function from the tools to rules in llguidance's Lark (see `serve_app.grammar.rules`), JSON on one line as
the family's chat template writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.text.tool_calls.kimi import Kimi

# Any text but control tokens.
_TEXT = r"/(?s:.*)/"


@dataclass(slots=True, frozen=True)
class CallRules:
    """Rules for the calls of one answer.

    ``calls``: one call or more and nothing else. ``mixed``: text with calls in it, none perhaps. ``rules`` are what
    both refer to; ``args_0``, ``args_1``... for the arguments of each tool are the caller's.
    """

    calls: str
    mixed: str
    rules: dict[str, str]
    headed: bool = False  # calls are messages of their own, in the place of the answer


# The token's name for one that stands in the vocabulary as a control token, None for others.
TokenRule = Callable[[str], str | None]
Family = Callable[[list[str], int, TokenRule], CallRules]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _objects(names: list[str], key: str) -> dict[str, str]:
    """``{"name": ..., key: {...}}`` for each tool, and their choice as the rule ``object``."""
    rules = {"object": " | ".join(f"object_{i}" for i in range(len(names)))}
    for i, name in enumerate(names):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        rules[f"object_{i}"] = f"{_quoted(head)} args_{i} {_quoted('}')}"
    return rules


def _repeated(item: str, separator: str, most: int) -> str:
    return item if most == 1 else f"{item} ({separator} {item}){{0,{most - 1}}}"


def _begun(marker: str, token: str | None) -> dict[str, str]:
    """Text up to and with a marker, as the rule ``begun``; ``text`` is any."""
    if token is not None:
        return {"text": _TEXT, "begun": f"text {token}"}
    # Without a control token the marker is text like any other, found where it first appears.
    return {"text": _TEXT, "begun[lazy]": f"/(?s:.*){re.escape(marker)}/"}


def _tagged(inside: str, between: str) -> Family:
    """``<tool_call>{...}</tool_call>`` with ``inside`` around the object and ``between`` calls."""
    opening, closing = "<tool_call>", "</tool_call>"

    def family(names: list[str], most: int, token: TokenRule) -> CallRules:
        pad = _quoted(inside) if inside else ""
        head, tail = token(opening), token(closing)
        rules = _objects(names, "arguments")
        rules["body"] = f"{pad} object {pad} {tail or _quoted(closing)}"
        rules["call"] = f"{head or _quoted(opening)} body"
        rules.update(_begun(opening, head))
        return CallRules(_repeated("call", _quoted(between) if between else "", most), "(begun body)* text", rules)

    return family


def _llama3(names: list[str], most: int, token: TokenRule) -> CallRules:
    """The whole answer is calls, or it is text that does not begin like one."""
    rules = _objects(names, "parameters")
    rules["calls"] = _repeated("object", _quoted("; "), most)
    return CallRules("calls", r"calls | PLAIN", {**rules, "PLAIN": r"/([^{\s<](?s:.*))?/"})


def _mistral(names: list[str], most: int, token: TokenRule) -> CallRules:
    name, args = "[TOOL_CALLS]", token("[ARGS]")
    head = token(name)
    marker = head or _quoted(name)
    if args is not None:
        rules = {"object": " | ".join(f"object_{i}" for i in range(len(names)))}
        rules.update({f"object_{i}": f"{_quoted(name)} {args} args_{i}" for i, name in enumerate(names)})
        rules["listed"] = _repeated("object", marker, most)
    else:
        rules = _objects(names, "arguments")
        rules["listed"] = f"{_quoted('[')} {_repeated('object', _quoted(', '), most)} {_quoted(']')}"
    return CallRules(f"{marker} listed", "begun listed | text", {**rules, **_begun(name, head)})


def _kimi(names: list[str], most: int, token: TokenRule) -> CallRules:
    section, call, arguments, end, section_end = (token(mark) or _quoted(mark) for mark in Kimi.markers)
    rules = {"object": " | ".join(f"object_{i}" for i in range(len(names))), "NUMBER": "/[0-9]{1,4}/"}
    for i, name in enumerate(names):
        rules[f"object_{i}"] = f"{call} {_quoted(f'functions.{name}:')} NUMBER {arguments} args_{i} {end}"
    rules["listed"] = f"{_repeated('object', '', most)} {section_end}"
    return CallRules(f"{section} listed", "begun listed | text", {**rules, **_begun(Kimi.marker, token(Kimi.marker))})


def _harmony(names: list[str], most: int, token: TokenRule) -> CallRules:
    """A message ends what is generated, so there is one."""
    marks = ("<|channel|>", "<|constrain|>", "<|message|>")
    channel, constrain, message = (token(mark) or _quoted(mark) for mark in marks)
    rules = {
        "object": " | ".join(f"object_{i}" for i in range(len(names))),
        "text": _TEXT,
        "PLAIN": r"/([^<](?s:.*))?/",
    }
    for i, name in enumerate(names):
        head = f"{channel} {_quoted(f'commentary to=functions.{name} ')} {constrain} {_quoted('json')} {message}"
        rules[f"object_{i}"] = f"{head} args_{i}"
    return CallRules("object", "object | PLAIN", rules, headed=True)


FAMILIES: dict[str, Family] = {
    "hermes": _tagged("\n", "\n"),
    "pico": _tagged("", ""),
    "llama3": _llama3,
    "mistral": _mistral,
    "kimi": _kimi,
    "harmony": _harmony,
}
