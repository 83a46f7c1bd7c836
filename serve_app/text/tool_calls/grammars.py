"""What a forced answer looks like in each family's format of tool calls: the other side of their parsers.

A family is a function from the tools to rules in llguidance's Lark (see `serve_app.grammar.rules`), JSON on one line as
the family's chat template writes it. Families that write arguments one by one say how (`Parameters`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.text.tool_calls.deepseek import (
    DSML,
    INVOKE,
    JSON_FOLLOWS,
    PARAMETER,
    PARAMETER_END,
    SECTIONS,
    TEXT_FOLLOWS,
    DeepSeek,
)
from serve_app.text.tool_calls.glm import KEY, KEY_END, VALUE, VALUE_END, Glm
from serve_app.text.tool_calls.kimi import Kimi

# Any text but control tokens.
_TEXT = r"/(?s:.*)/"


@dataclass(slots=True, frozen=True)
class Parameters:
    """How arguments are written one after another; `serve_app.grammar.parameters` makes rules of it.

    ``before``: the rule for what stands before a value, from that of the key and whether the value is a string;
    ``mark``: what ends a value, as text: ``suffix`` belongs to the string's terminal and ``rest`` is the rule for what
    follows it; ``after``: the rule for what stands behind the mark; ``empty``: that for no arguments; ``told``: whether
    ``before`` tells strings from JSON, so that no schema has to; ``banned``: characters that no key has.
    """

    before: Callable[[str, bool], str]
    mark: str
    suffix: str
    rest: str
    after: str
    empty: str
    told: bool
    banned: str

    @property
    def end_of_json(self) -> str:
        return " ".join(part for part in (_quoted(self.suffix) if self.suffix else "", self.rest) if part)


@dataclass(slots=True, frozen=True)
class CallRules:
    """Rules for the calls of one answer.

    ``calls``: one call or more and nothing else. ``mixed``: text with calls in it, none perhaps. ``rules`` are what
    both refer to; ``args_0``, ``args_1``... for the arguments of each tool are the caller's: JSON, or what
    ``parameters`` says.
    """

    calls: str
    mixed: str
    rules: dict[str, str]
    headed: bool = False  # calls are messages of their own, in the place of the answer
    parameters: Parameters | None = None


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


def _glm(names: list[str], most: int, token: TokenRule) -> CallRules:
    """With line breaks or without, which the model knows."""
    key, key_end, value = (token(mark) or _quoted(mark) for mark in (KEY, KEY_END, VALUE))
    head, tail, value_end = token(Glm.marker), token(Glm.close), token(VALUE_END)
    line = f"{_quoted(chr(10))}?"
    parameters = Parameters(
        before=lambda name, text: f"{key} {name} {key_end} {line} {value}",
        mark=VALUE_END,
        suffix="" if value_end else VALUE_END,
        rest=value_end or "",
        after=line,
        empty="",
        told=False,
        banned="<>",
    )
    rules = {"object": " | ".join(f"object_{i}" for i in range(len(names)))}
    rules.update({f"object_{i}": f"{_quoted(name)} {line} args_{i}" for i, name in enumerate(names)})
    rules["body"] = f"object {tail or _quoted(Glm.close)}"
    rules["call"] = f"{head or _quoted(Glm.marker)} body"
    rules.update(_begun(Glm.marker, head))
    return CallRules(_repeated("call", line, most), "(begun body)* text", rules, parameters=parameters)


def _deepseek(names: list[str], most: int, token: TokenRule) -> CallRules:
    """A section of either name, which the model knows."""
    dsml = token(DSML)

    quote, line = '"', "\n"

    def tag(before: str, after: str) -> str:
        """Marks are text around the control token; without one they are text."""
        return f"{_quoted(before)} {dsml} {_quoted(after)}" if dsml else _quoted(f"{before}{DSML}{after}")

    parameters = Parameters(
        before=lambda key, text: f"{tag('<', PARAMETER)} {key} {_quoted(TEXT_FOLLOWS if text else JSON_FOLLOWS)}",
        mark=PARAMETER_END,
        suffix="</" if dsml else PARAMETER_END,
        rest=f"{dsml} {_quoted('parameter>')}" if dsml else "",
        after=_quoted(line),
        empty=_quoted(line),
        told=True,
        banned='"<>',
    )
    rules = {"object": " | ".join(f"object_{i}" for i in range(len(names)))}
    for i, name in enumerate(names):
        rules[f"object_{i}"] = f"{tag('<', INVOKE + name + quote + '>' + line)} args_{i} {tag('</', 'invoke>')}"
    # Break and mark are terminals of their own: one that began like another would keep the lexer from that.
    listed = f"{_repeated('object', _quoted(line), most)} {_quoted(line)}"
    sections = [f"{_quoted(section + line)} {listed} {tag('</', section)}" for section in SECTIONS]
    rules["section"] = " | ".join(sections)
    if dsml:
        rules |= {"text": _TEXT, "BEFORE": "/(?s:.*)</", "begun": f"BEFORE {dsml}"}
    else:
        rules |= _begun(DeepSeek.marker, None)
    opening = f"{_quoted('<')} {dsml}" if dsml else _quoted(DeepSeek.marker)
    blank = _quoted(line * 2)
    return CallRules(f"({blank})? {opening} section", "begun section | text", rules, parameters=parameters)


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
    "glm": _glm,
    "deepseek": _deepseek,
    "harmony": _harmony,
}
