"""Docstrings -> facts: one clean sentence or two about each symbol, all in one style.

"`math.sqrt` returns the square root of x."  The verb goes to the third person; signature lines, doctests,
markup and everything after the first sentence (or two short ones) go away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from training.corrections import CORRECTIONS
from training.curated import OVERRIDES
from training.symbols import Symbol, collect

MAX_CHARS = 230
_VERB_ES = re.compile(r"(s|x|z|ch|sh|o)$")
VERBS = {
    "return", "create", "make", "compute", "calculate", "get", "set", "open", "close", "read", "write",
    "parse", "convert", "find", "split", "join", "remove", "delete", "insert", "append", "add", "check",
    "test", "determine", "raise", "yield", "iterate", "call", "run", "execute", "apply", "format",
    "print", "send", "receive", "start", "stop", "wait", "acquire", "release", "register", "unregister",
    "compare", "copy", "move", "rename", "replace", "search", "match", "generate", "produce", "build",
    "construct", "decode", "encode", "compress", "decompress", "load", "dump", "store", "save",
    "change", "initialize", "give", "wrap", "perform", "provide", "represent", "retrieve", "extract",
    "pop", "push", "put", "rotate", "reverse", "sort", "merge", "count", "select", "choose", "draw",
    "emit", "handle", "enable", "disable", "configure", "install", "import", "invoke", "list",
    "display", "show", "shut", "terminate", "kill", "block", "try", "turn", "resolve", "expand",
    "normalize", "fill", "shuffle", "seed", "sleep", "suspend", "schedule", "cancel", "mark",
    "report", "define", "evaluate", "escape", "unescape", "quote", "unquote", "concatenate", "combine",
    "transform", "strip", "lowercase", "uppercase", "capitalize", "center", "indicate", "request",
    "reset", "clear", "update", "extend", "bind", "connect", "listen", "accept", "detach", "duplicate",
    "flush", "truncate", "seek", "rewind", "skip", "log", "describe", "instantiate", "walk",
    "unpack", "pack", "map", "filter", "reduce", "swap", "pad", "right", "left-justify", "dedent",
    "indent", "decorate", "allow", "group", "hash", "serialize", "deserialize", "assert", "fetch",
    "pause", "lock", "unlock", "notify", "wake", "force", "attempt", "restore", "record",
    "dispatch", "translate", "interpret", "look", "use", "assign", "mutate", "tell", "obtain",
    "validate", "verify", "round", "sum", "multiply", "subtract", "divide", "negate",
    "shift", "implement", "specify", "encapsulate", "hold", "exit", "enter", "create-or",
    "locate", "unlink", "touch", "rmtree", "lookup", "query", "examine", "estimate",
    "approximate", "guess", "analyze", "collect", "tokenize", "prepare", "ensure",
    "invert", "collapse", "break", "traverse", "visit", "compile", "recompile",
    "disassemble", "drop", "permit", "finish", "process", "signal", "spawn", "fork", "launch", "reveal",
    "leave", "dup", "advance", "associate", "pretty-print", "uninstall", "consume", "switch",
    "inherit", "override", "patch", "delegate", "throw", "simulate", "issue",
}  # fmt: skip
IRREGULAR = {"have": "has", "be": "is", "do": "does", "try": "tries", "apply": "applies", "copy": "copies",
             "modify": "modifies", "verify": "verifies", "notify": "notifies", "specify": "specifies",
             "query": "queries"}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Fact:
    """What the models learn about one symbol; `tail` is the answer without the leading name."""

    name: str
    module: str
    kind: str
    tail: str
    core: bool

    @property
    def answer(self) -> str:
        return f"`{self.name}`{'' if self.tail[0] == ':' else ' '}{self.tail}"


def third_person(verb: str) -> str:
    """`Return` -> `returns`."""
    v = verb.lower()
    if v in IRREGULAR:
        return IRREGULAR[v]
    return v + ("es" if _VERB_ES.search(v) else "s")


def first_prose(doc: str) -> str:
    """The first paragraph of prose, without signature lines, doctests, headings and markup."""
    doc = doc.replace("\t", " ")
    for para in re.split(r"\n\s*\n", doc.strip()):
        lines = [x.strip() for x in para.splitlines()]
        lines = [x for x in lines if not re.fullmatch(r"[-=~*_#]{3,}", x)]
        while lines and (
            re.match(r"^[\w.\[\]\"'|]*\([^)]*\)?.*(->|=>)\s*\S+", lines[0])
            or re.match(r"^[A-Za-z_][\w.]*\([^()]*(\([^()]*\))?[^()]*\)[:.]?$", lines[0])
            or lines[0].startswith((">>>", "...", ".. "))
        ):
            hint = re.search(r"(->|=>)\s*[^.]*?(\s--\s*|:\s+)(.+)$", lines[0])
            lines = lines[1:]
            if hint and not lines:
                lines = [hint.group(3)]
        text = " ".join(x for x in lines if x)
        text = re.sub(r":\w+:`~?([^`]+)`", r"\1", text)
        text = re.sub(r"\*\*?(\w[\w ]*)\*\*?", r"\1", text).replace("``", "").replace("`", "")
        text = re.sub(r"\s+", " ", text).strip()
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and not text.endswith(("Usage:", "usage:")):
            return text
    return ""


def sentences(text: str, limit: int = MAX_CHARS) -> str:
    """The first sentence, and the next ones while the whole stays short."""
    text = re.sub(r"\b(e\.g|i\.e)\.,?", lambda m: m.group(1).replace(".", "\0") + "\0", text)
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z`'\"])", text)
    out = parts[0]
    for more in parts[1:]:
        if len(out) + len(more) + 1 > 110:
            break
        out += " " + more
    out = out.replace("\0", ".").rstrip(" :;,-")
    if len(out) > limit:
        cut = max(out.rfind(", ", 0, limit), out.rfind("; ", 0, limit), out.rfind(" (", 0, limit))
        out = out[:cut] if cut > 60 else out[: out.rfind(" ", 0, limit)]
    out = out.rstrip(" :;,-")
    if out.count("(") > out.count(")"):
        out = out[: out.rfind("(")].rstrip(" :;,-")
    return out if out.endswith((".", "!", "?")) else out + "."


_SECOND_VERB = re.compile(
    r"\b(and|then) (return|compute|close|raise|remove|write|decode|read|set|append|pop|store)\b(?! value)"
)


def tail_of(symbol: Symbol) -> str:
    """The answer after the name, or "" where the docstring says nothing usable; verbs joined by "and"
    agree.
    """
    tail = _tail(symbol)
    first = tail.partition(" ")[0]
    if first.endswith("s") and first not in ("is", "has", "does"):
        tail = _SECOND_VERB.sub(lambda m: f"{m.group(1)} {third_person(m.group(2))}", tail)
    return tail


def _tail(symbol: Symbol) -> str:
    text = first_prose(symbol.doc)
    if not text:
        return ""
    last = symbol.name.rpartition(".")[2]
    text = re.sub(rf"^(?:\w+\.)*{re.escape(last)}(?:\([^)]*\))?\s*(?:--?-?|:|\u2014)\s+", "", text)
    text = re.sub(r"^(This|The) (module|class|function|method) (?=[a-z]+s\b)", "\0", text)
    text = re.sub(r"^[A-Z][\w.]*\.(py|c): ", "", text)
    if not text:
        return ""
    if text.startswith("\0"):
        return sentences(text[1:])
    text = sentences(text[0].upper() + text[1:])
    first, _, rest = text.partition(" ")
    word = re.sub(r"[^A-Za-z-]", "", first)
    if word.lower() in VERBS and rest and not rest.startswith("can't"):
        comma = "," if first.endswith(",") else ""
        return f"{third_person(word)}{comma} {rest}"
    if word.endswith("s") and (word[:-1].lower() in VERBS or word[:-2].lower() in VERBS) and rest:
        return f"{word.lower()} {rest}"
    if first in ("A", "An", "The"):
        return f"is {first.lower()} {rest}"
    if re.match(rf"{re.escape(last)}\b (is|are|returns|provides|does|can) ", text, re.I):
        return text[len(last) + 1 :]
    if re.match(r"(It|This) (is|returns|provides|can) ", text):
        return text.partition(" ")[2]
    adverb = re.match(r"([A-Z][a-z]+ly) ([a-z]+) (.+)$", text)
    if adverb and adverb.group(2) in VERBS:
        return f"{adverb.group(1).lower()} {third_person(adverb.group(2))} {adverb.group(3)}"
    return f": {text}"


def build_facts() -> list[Fact]:
    """All facts in a fixed order; a curated sentence replaces the docstring where that one is unhelpful."""
    out: list[Fact] = []
    for s in collect():
        tail = OVERRIDES.get(s.name) or CORRECTIONS.get(s.name) or tail_of(s)
        if len(tail) >= 12:
            out.append(Fact(s.name, s.module, s.kind, tail, s.core))
    known = {f.name for f in out}
    for name, tail in OVERRIDES.items():
        if name not in known:
            out.append(
                Fact(
                    name,
                    name.rpartition(".")[0] or "builtins",
                    "keyword" if "." not in name else "class",
                    tail,
                    True,
                )
            )
    return out
