"""Control tokens in people's text: it stays text, byte for byte, while those that a template writes stay tokens.

Wherever people's text spells a control token (``<|im_end|>``, ``<tool_call>``), the spelling is swapped for an
unguessable *stand-in* before the template sees it, so that in the rendered prompt a control token's name is the
template's. Such a prompt is then read by a copy of the tokenizer in which control tokens have other, unguessable names:
the template's are written with those, stand-ins become the spellings again, and to the copy these are ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

# What models of a tool or reasoning format react to, special or not.
_MARKS = ("think", "/think", "tool_call", "/tool_call", "tool_response", "/tool_response")


def control_names(added: dict[int, AddedToken], templates: Iterable[str]) -> dict[str, int]:
    """The added tokens that steer a model, with their ids.

    Those are the special ones, and of the others those in brackets that a chat template names or that look like
    ``<|name|>``. What is left, Gemma's ``<table>`` say, are words that it has learned.
    """
    sources = "".join(templates)
    return {
        token.content: index
        for index, token in added.items()
        if token.content and (token.special or _steers(token.content, sources))
    }


def _steers(name: str, sources: str) -> bool:
    if len(name) < 3 or name[0] + name[-1] not in ("<>", "[]"):
        return False
    inner = name[1:-1]
    return name in sources or inner in _MARKS or (inner[0] == inner[-1] and inner[0] in "|｜")


class NoCopy(Exception):
    """The text spells a control token, and the tokenizer's copy for that is not made yet, which takes a while."""


class ControlTokens:
    """The control tokens of ``backend`` by their ``names``: finds them in text and keeps people's text apart."""

    def __init__(self, backend: Backend, names: dict[str, int]) -> None:
        self.names = names
        self.ids = frozenset(names.values())
        self._backend = backend
        self._secret = secrets.token_hex(16)
        ordered = sorted(names, key=len, reverse=True)
        self._stand_in = {name: f"@{self._secret}:{i}@" for i, name in enumerate(ordered)}
        self._renamed = {name: f"@{self._secret}:{i}!@" for i, name in enumerate(ordered)}
        self._gap = f"@{self._secret}:-@"
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if names else None
        self._swapped = {**self._renamed, self._gap: "", **{v: k for k, v in self._stand_in.items()}}
        self._swaps = re.compile("|".join(map(re.escape, self._swapped)))
        self._lock = threading.Lock()
        self._copy: Backend | None = None

    def count(self, text: str) -> int:
        """How many control tokens ``text`` spells."""
        return sum(1 for _ in self._pattern.finditer(text)) if self._pattern else 0

    def neutralise(self, text: str) -> str:
        """``text`` with stand-ins for the control tokens it spells; to be read by `reader`."""
        if self._pattern is None or not self._pattern.search(text):
            return text
        return self._pattern.sub(lambda match: self._stand_in[match.group()], text)

    def edges(self, text: str) -> bool:
        """Whether ``text`` could complete a control token together with what stands before or after it."""
        core = text.strip()
        heads, tails = self._heads, self._tails
        return any(core[:size] in tails or core[-size:] in heads for size in range(1, self._longest))

    def mark(self, text: str) -> str:
        """``text`` with gaps at its edges, inside the white space around it, which templates like to trim.

        A gap is nothing to the tokenizer, but keeps what stands on its two sides from being read as one name.
        """
        if not self.edges(text):
            return text
        core = text.strip()
        start = text.index(core)
        return f"{text[:start]}{self._gap}{core}{self._gap}{text[start + len(core) :]}"

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(name[i:] for name in self.names for i in range(1, len(name)))

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(name[:i] for name in self.names for i in range(1, len(name)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.names), default=0)

    def marked(self, text: str) -> bool:
        """Whether there are stand-ins or gaps in ``text``."""
        return self._secret in text

    def reader(self, texts: list[str], *, at_once: bool = False) -> tuple[Backend, list[str]]:
        """Who reads ``texts``, and how they have to be written for that. With ``at_once`` raises :class:`NoCopy` rather
        than make the copy."""
        if not any(map(self.marked, texts)):
            return self._backend, texts
        if at_once and self._copy is None:
            raise NoCopy
        with self._lock:
            if self._copy is None:
                self._copy = self._renamed_copy()
        return self._copy, [self._swaps.sub(lambda match: self._swapped[match.group()], text) for text in texts]

    def _renamed_copy(self) -> Backend:
        """The tokenizer with other names for its control tokens, which stand for the same ids. Takes up to a second for
        the largest vocabularies, and is only made where text needs it."""
        spec = json.loads(self._backend.to_str())
        model, renamed = spec["model"], self._renamed
        beyond = {}
        for token in spec["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
            beyond[token["content"]] = token["id"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {renamed.get(name, name): index for name, index in model["vocab"].items()}
            # Added tokens keep their ids because the model has them.
            model["vocab"].update(beyond)
        else:
            model["vocab"] = [[renamed.get(name, name), score] for name, score in model["vocab"]]
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        if model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if not self._makes_control(merge)]
        copy = Backend.from_str(json.dumps(spec, ensure_ascii=False))
        for name, index in self.names.items():
            if copy.token_to_id(renamed[name]) != index:
                raise ValueError(f"the control token {name} can't be told from text that spells it")
        return copy

    def _makes_control(self, merge: Any) -> bool:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        return not self._renamed.keys().isdisjoint((left, right, left + right))
