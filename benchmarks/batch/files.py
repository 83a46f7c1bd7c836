"""Seeded input files of batches, as OpenAI's API takes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

WORDS = (
    *("return", "iterator", "over", "items", "sequence", "value", "function", "object", "string", "list", "key"),
    *("dictionary", "number", "file", "path", "module", "class", "method", "argument", "default", "error", "raise"),
    *("test", "result", "sorted", "index", "count", "window", "buffer", "token", "prompt", "answer"),
)


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def line(number: int, model: str, messages: list[dict[str, str]], tokens: int) -> bytes:
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    row = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row, separators=(",", ":")).encode()


def short_requests(model: str, count: int, *, tokens: int = 16, seed: int = 0) -> Iterator[bytes]:
    """Questions of some ten to forty words, no two alike."""
    rng = random.Random(seed)
    for number in range(count):
        asked = f"{number} {text(rng, rng.randrange(10, 40))}"
        yield line(number, model, [{"role": "user", "content": asked}], tokens)


def shared_prefixes(model: str, count: int, *, tokens: int = 4, seed: int = 0) -> Iterator[bytes]:
    """A mixture in an order without a system: half of the requests have one of ``count // 10`` instructions of 100 to
    300 words, a quarter one of 12 examples behind one of these, and a quarter share nothing.
    """
    rng = random.Random(seed)
    instructions = [text(rng, rng.randrange(100, 300)) for _ in range(max(2, count // 10))]
    examples = [text(rng, 80) for _ in range(12)]
    for number in range(count):
        kind = rng.random()
        asked = text(rng, rng.randrange(8, 30))
        if kind < 0.75:
            begins = rng.choice(instructions)
            messages = [{"role": "system", "content": begins}]
            if kind < 0.25:
                asked = f"{rng.choice(examples)} {asked}"
            messages.append({"role": "user", "content": asked})
        else:
            messages = [{"role": "user", "content": f"{number} {text(rng, 60)} {asked}"}]
        yield line(number, model, messages, tokens)


def long_file(model: str, count: int, *, seed: int = 0) -> Iterator[bytes]:
    """Lines of about 220 bytes."""
    rng = random.Random(seed)
    for number in range(count):
        asked = f"{number} {rng.getrandbits(64):x} {WORDS[number % len(WORDS)]} {WORDS[number // 7 % len(WORDS)]}"
        yield line(number, model, [{"role": "user", "content": asked}], 16)
