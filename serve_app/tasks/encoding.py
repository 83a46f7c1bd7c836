"""Token sequences through encoder replicas, for tasks that read texts: groups of them at once, rows back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from msgspec.structs import replace as with_changes

from serve_app.api.errors import InputTooLong, InvalidInput
from serve_app.api.types import Shorten, Usage
from serve_app.tasks.estimate import Estimate, Foreseen, estimate_of
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime, Work
from serve_app.wire.encode import EncodeCall, Encoded, EncodedTokens
from serve_app.wire.generate import Failed
from serve_app.wire.methods import ENCODE

# Sequences per call to a replica: small enough to spread one caller's thousands over replicas.
GROUP = 256
# Characters that are tokenised at once: inline where there are no more, in slices of a thread where there are.
INLINE_CHARS = 20_000
# A longer text is refused unread. Words have a few bytes per token; what has so many is no text.
BYTES_PER_TOKEN = 128

_Text = TypeVar("_Text", str, tuple[str, str])
_Tokens = TypeVar("_Tokens", np.ndarray, tuple[np.ndarray, np.ndarray])


async def tokenise(
    model: ServedModel,
    encode: Callable[[list[_Text]], list[_Tokens]],
    texts: list[_Text],
    shorten: Shorten | None = None,
) -> list[_Tokens]:
    """``encode(texts)``, of texts or pairs of texts; ``encode`` gives token ids, or a tuple that begins with them.

    Raises `InputTooLong` for the first text that the model can't take: by its bytes before anything is tokenised, by
    its tokens before the next slice is. Texts that ``encode`` will ``shorten`` are clipped instead. Slices of many
    texts leave the event loop alone, and take turns with others'.
    """
    limit = model.record.properties.max_input_tokens
    if limit is not None and shorten is not None:
        texts = [_clipped(text, limit * BYTES_PER_TOKEN // 4, shorten) for text in texts]
    elif limit is not None:
        for index, text in enumerate(texts):
            if (size := _bytes(text)) > limit * BYTES_PER_TOKEN:
                raise _too_long(model, index, f"{size} bytes", f"{limit} tokens and {limit * BYTES_PER_TOKEN} bytes")
    if sum(map(_chars, texts)) <= INLINE_CHARS:
        return within(model, encode(texts), 0)
    found: list[_Tokens] = []
    while len(found) < len(texts):
        start, chars, end = len(found), 0, len(found)
        while end < len(texts) and (end == start or chars + _chars(texts[end]) <= INLINE_CHARS):
            chars += _chars(texts[end])
            end += 1
        found += within(model, await asyncio.to_thread(encode, texts[start:end]), start)
    return found


def _clipped(text: _Text, chars: int, shorten: Shorten) -> _Text:
    """``text``, or each of a pair, with the characters only of which tokens could stay."""
    if isinstance(text, tuple):
        return tuple(_clipped(part, chars, shorten) for part in text)  # type: ignore[return-value]
    return text[-chars:] if shorten.side == "start" else text[:chars]


def within(model: ServedModel, found: list[_Tokens], start: int = 0) -> list[_Tokens]:
    """``found``, the tokens of the texts from number ``start`` on, if the model takes them."""
    limit = model.record.properties.max_input_tokens
    for index, tokens in enumerate(found, start):
        count = len(tokens[0] if isinstance(tokens, tuple) else tokens)
        if limit is not None and count > limit:
            raise _too_long(model, index, f"{count} tokens", f"{limit}")
    return found


def _too_long(model: ServedModel, index: int, has: str, most: str) -> InputTooLong:
    return InputTooLong(
        f"Input {index} has {has}; {model.id} takes at most {most}. Split it, or have it cut (truncate)."
    )


def _chars(text: str | tuple[str, str]) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def _bytes(text: str | tuple[str, str]) -> int:
    return sum(
        len(part) if part.isascii() else len(part.encode()) for part in ([text] if isinstance(text, str) else text)
    )


def fitting(model: ServedModel, shorten: Shorten | None) -> Shorten | None:
    """``shorten`` with what the model takes as its bound."""
    limit = model.record.properties.max_input_tokens
    if shorten is None or limit is None:
        return shorten
    return replace(shorten, tokens=min(shorten.tokens or limit, limit))


async def encode(
    runtime: Runtime, work: Work, ids: list[np.ndarray], types: list[np.ndarray] | None, asked: EncodeCall
) -> list[Encoded | EncodedTokens]:
    """The workers' answers for sequences ``ids`` (int32) with token ``types``, group by group; counts the tokens.
    ``asked`` says what for.
    """
    work.placed = True
    asked = with_changes(asked, priority=work.caller.priority)
    starts = range(0, len(ids), GROUP)
    calls = [
        _group(runtime, work.model, ids[i : i + GROUP], types[i : i + GROUP] if types is not None else None, asked)
        for i in starts
    ]
    results = await asyncio.gather(*calls)
    work.usage = Usage(prompt_tokens=sum(len(s) for s in ids))
    return results


async def _group(
    runtime: Runtime,
    model: ServedModel,
    ids: list[np.ndarray],
    types: list[np.ndarray] | None,
    asked: EncodeCall,
) -> Encoded | EncodedTokens:
    call = with_changes(
        asked,
        ids=np.concatenate(ids).astype(np.int32).tobytes(),
        lengths=np.array([len(s) for s in ids], np.int32).tobytes(),
        types=None if types is None else np.concatenate(types).astype(np.int32).tobytes(),
    )
    result = await runtime.call_retried(model, ENCODE, call)
    if isinstance(result, Failed):
        raise InvalidInput(f"The model refuses this input: {result.error}.")
    return result


def estimate_reading(runtime: Runtime, model: ServedModel, ids: list[np.ndarray]) -> Estimate:
    """What reading sequences costs: no cache holds anything of them, and nothing is known of when they begin."""
    units = {"input_tokens": sum(map(len, ids))}
    return estimate_of(runtime.quote(model), model, units, units, units, Foreseen())


def rows(results: list[Encoded | EncodedTokens]) -> np.ndarray:
    """Rows of one length, [n, d] or [n]."""
    found = [np.frombuffer(r.data, np.float32).reshape(r.shape) for r in results if isinstance(r, Encoded)]
    return np.concatenate(found) if found else np.zeros((0, 0), np.float32)
