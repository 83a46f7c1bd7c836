"""Prompts to have a model write from: a file's, or the built-in ones."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.text.prompt import render
from serve_app.text.tokenizer import Tokenizer

HELD_OUT_SHARE, HELD_OUT_LEAST, HELD_OUT_MOST = 0.1, 2, 64
_ASK = (
    "Explain {x} to a beginner.", "What are the advantages and drawbacks of {x}?", "Write a short article about {x}.",
    "Give me five facts about {x}.", "How does {x} work?", "Write a dialogue between two friends about {x}.",
    "Summarise what one should know about {x} in three sentences.", "Make a table that compares kinds of {x}.",
    "What are common mistakes with {x}, and how does one avoid them?", "Write a step-by-step guide to {x}.",
)  # fmt: skip
_ABOUT = (
    "photosynthesis", "public transport", "binary search", "baking bread", "the water cycle", "chess openings",
    "renewable energy", "learning a language", "hash tables", "the Roman Empire", "first aid", "gardening",
    "personal budgeting", "volcanoes", "recursion", "job interviews", "classical music", "vaccines", "bicycles",
    "unit tests", "the solar system", "negotiation", "SQL joins", "coffee", "remote work", "black holes",
)  # fmt: skip
_CODE = (
    "Write a Python function that {x}.", "Write a JavaScript function that {x}.", "Write a test for code that {x}.",
    "Explain how you would write a program that {x}.",
)  # fmt: skip
_TASKS = (
    "reverses a linked list", "parses a CSV file", "counts the words in a text", "finds the shortest path in a graph",
    "checks whether a string is a palindrome", "merges two sorted lists", "caches the results of another function",
    "downloads a web page and lists its links", "converts Roman numerals", "validates an e-mail address",
)  # fmt: skip


class BadPrompts(ValueError):
    """The prompt file can't be used; the text says which line, and what is expected."""


@dataclass(slots=True)
class Prompts:
    """Token ids of prompts to learn from, and of others to measure on."""

    train: list[list[int]]
    held_out: list[list[int]]


def built_in() -> list[dict[str, Any]]:
    """A few hundred requests about everyday subjects and code."""
    asked = [ask.format(x=x) for ask, x in itertools.product(_ASK, _ABOUT)]
    asked += [ask.format(x=x) for ask, x in itertools.product(_CODE, _TASKS)]
    return [{"prompt": text} for text in asked]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """One prompt a line: text, or a JSON object with ``prompt``, ``messages`` (and ``tools``) or token ``ids``."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPrompts(f"{path} can't be read ({error}); give a UTF-8 text file with one prompt a line") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        item: Any = {"prompt": line}
        if line.lstrip().startswith("{"):
            try:
                item = json.loads(line)
            except ValueError as error:
                raise BadPrompts(f"{path}, line {number} begins like JSON but is none: {error}") from None
            if not any(kind in item for kind in ("prompt", "messages", "ids")):
                raise BadPrompts(f'{path}, line {number} has none of "prompt", "messages" and "ids"')
        found.append(item)
    return found


def prepare(items: list[dict[str, Any]], folder: Path, *, longest: int, vocab: int, seed: int) -> Prompts:
    """Prompts as token ids, shuffled; some are held out. Raises :class:`BadPrompts` if too few are usable."""
    tokenizer: Tokenizer | None = None
    ids = []
    for item in items:
        if "ids" in item:
            tokens = [int(t) for t in item["ids"]]
        else:
            tokenizer = tokenizer or _tokenizer(folder)
            tokens = _encode(tokenizer, item)
        if 0 < len(tokens) <= longest and all(0 <= t < vocab for t in tokens):
            ids.append(tokens)
    held = min(HELD_OUT_MOST, max(HELD_OUT_LEAST, int(len(ids) * HELD_OUT_SHARE)))
    if len(ids) < 2 * held:
        raise BadPrompts(
            f"{len(ids)} of {len(items)} prompts are usable (1 to {longest} tokens); give at least {2 * held}"
        )
    random.Random(seed).shuffle(ids)
    return Prompts(ids[held:], ids[:held])


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer(folder)
    except FileNotFoundError as error:
        raise BadPrompts(f'{error}; give prompts as JSON lines with "ids" instead') from None


def _encode(tokenizer: Tokenizer, item: dict[str, Any]) -> list[int]:
    ids: np.ndarray
    if tokenizer.chat_template() is None:
        ids = tokenizer.encode(item["prompt"] if "prompt" in item else item["messages"][-1]["content"])
    else:
        messages = item.get("messages") or [{"role": "user", "content": item["prompt"]}]
        ids = tokenizer.encode_prompt(render(tokenizer, messages, item.get("tools")))
    return ids.tolist()
