r"""Grammar texts: rules in llguidance's Lark, and how they make up the grammar of one answer.

JSON is written on one line, ``{"a": 1, "b": [2, 3]}``, as chat templates and Python's ``json.dumps`` write it: without
a choice of white space no model can lose itself in it, and most of the punctuation is forced and need not be guessed.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from serve_app.grammar import GrammarError

_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Nothing may be ignored silently or approximated.
    "coerce_one_of": False,
    "lenient": False,
}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Options of rules that can't be undone, or that change the sampling: drafts are taken back all the time.
_OPTIONS = re.compile(r"[\[,]\s*(max_tokens|temperature|stop|capture|stop_capture)\s*=")


def literal(text: str) -> str:
    """A terminal for exactly ``text``."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: dict[str, Any]) -> str:
    """JSON text that validates against ``schema``."""
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE}, ensure_ascii=False)


def regex_rule(pattern: str) -> str:
    """Text that matches ``pattern`` (Rust's syntax, which is Python's without look-arounds and back-references)."""
    # Anchors at the ends say what is true anyway: the whole answer matches.
    pattern = pattern.removeprefix("^").removeprefix("\\A")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    return f"/{regex_to_lark(pattern, '')}/" if pattern else '""'


def choice_rule(choices: Sequence[str]) -> str:
    """One of ``choices``, as one expression: as alternatives of the grammar, a thousand of them would be a thousand
    places to look at."""
    return f"/{'|'.join(_exactly(choice) for choice in dict.fromkeys(choices))}/"


def _exactly(text: str) -> str:
    """An expression for ``text``."""
    return "".join(char if char.isalnum() or char == " " or ord(char) > 127 else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    # A backslash before an angle bracket is a word boundary.
    return f"\\{char}" if char in string.punctuation and char not in "<>" else f"\\x{ord(char):02x}"


def lark_grammar(text: str) -> str:
    """A client's whole grammar, in Lark or GBNF, as Lark. Raises :class:`GrammarError`."""
    try:
        lark = any_to_lark(text) if "::=" in text else text
    except Exception as error:
        raise GrammarError(f"it is neither Lark nor GBNF: {error}") from None
    if option := _OPTIONS.search(lark):
        raise GrammarError(f"the option {option[1]} of a rule is not supported; leave it out")
    return lark


def grammar(start: str, rules: dict[str, str]) -> str:
    """A whole grammar text: ``start`` over ``rules``."""
    return "".join(f"{name}: {body}\n" for name, body in {"start": start, **rules}.items())
