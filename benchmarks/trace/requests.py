"""Traces in Mooncake's format: one JSON object a line, https://github.com/kvcache-ai/Mooncake (FAST25 release).

``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, ``hash_ids`` one per 512 tokens of
prompt: equal ids mean equal prefixes. No text is in such a trace, and nothing of what was answered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

BLOCK = 512  # tokens that one hash id stands for


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """``at`` in seconds from the trace's start; ``blocks`` are keys, the last may stand for less than 512 tokens."""

    id: str
    at: float
    prompt: int
    output: int
    blocks: tuple[bytes, ...]
    tenant: str = ""
    adapter: bytes = b""  # the name of the one that it wants; empty: none


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceRequest]:
    """Raises ValueError for a line that is not of the format."""
    found = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(found) >= limit:
                break
            try:
                row = json.loads(line)
                blocks = tuple(_key(n) for n in row["hash_ids"])
                request = TraceRequest(
                    f"r{number}",
                    row["timestamp"] / 1e3,
                    max(1, row["input_length"]),
                    max(1, row["output_length"]),
                    blocks,
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number} is not a line of a Mooncake trace: {error}") from error
            found.append(request)
    return sorted(found, key=lambda r: r.at)


def with_adapters(trace: Iterable[TraceRequest], count: int) -> list[TraceRequest]:
    """Each conversation with one of ``count`` adapters, all of them asked for alike. What one adapter has computed is
    of no use to another. The trace has no names of conversations: a prompt's second block, behind what is common to
    many, stands for it.
    """

    def adapted(request: TraceRequest) -> TraceRequest:
        number = int.from_bytes(request.blocks[:2][-1], "little") % count
        adapter = _key(number)
        return replace(request, adapter=adapter, blocks=tuple(_salted(adapter, block) for block in request.blocks))

    return [adapted(request) for request in trace]


def beside_each_other(trace: list[TraceRequest], copies: int) -> list[TraceRequest]:
    """So many of the trace at a time, each with prefixes of its own and a part of a minute behind the one before."""
    found = []
    for copy in range(copies):
        salted: dict[bytes, bytes] = {}  # equal keys are one object
        salt = _key(copy)
        for request in trace:
            blocks = tuple(salted.setdefault(key, _salted(salt, key)) for key in request.blocks)
            at = request.at + 60.0 * copy / copies
            found.append(replace(request, id=f"{copy}-{request.id}", at=at, blocks=blocks))
    return sorted(found, key=lambda request: request.at)


def write_trace(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def synthetic_rows(
    requests: int, *, seed: int = 0, rate: float = 3.0, turns: float = 4.0, share: float = 0.5
) -> list[dict]:
    """A small trace for tests: conversations that come back with a longer prompt, behind a common first block.

    ``rate`` requests a second, about ``turns`` turns a conversation, ``share`` of the requests continue one.
    """
    draw = random.Random(seed)
    rows, at, next_id = [], 0.0, 1
    open_talks: list[list[int]] = []
    for _ in range(requests):
        at += draw.expovariate(rate)
        goes_on = bool(open_talks) and draw.random() < share
        ids = open_talks.pop(draw.randrange(len(open_talks))) if goes_on else [0]
        grown = max(1, int(draw.lognormvariate(2.0, 0.8)))
        ids = [*ids, *range(next_id, next_id + grown)]
        next_id += grown
        length = BLOCK * (len(ids) - 1) + draw.randint(1, BLOCK)
        rows.append({"timestamp": int(at * 1000), "input_length": length,
                     "output_length": max(1, int(draw.lognormvariate(5.3, 0.8))), "hash_ids": ids})  # fmt: skip
        if draw.random() > 1.0 / turns:
            # The last block was partial: the next turn has another one in its place.
            open_talks.append(ids[:-1])
    return rows


def unlimited_hit_ratio(trace: list[TraceRequest]) -> float:
    """Prompt tokens that a cache of unlimited size holds already when each request comes, over all prompt tokens."""
    total = sum(request.prompt for request in trace)
    return 1.0 - sum(unlimited_misses(trace)) / max(total, 1)


def unlimited_misses(trace: list[TraceRequest]) -> list[int]:
    """Per request, the prompt tokens that even a cache of unlimited size would not hold; at least one."""
    seen: set[bytes] = set()
    missed = []
    for request in trace:
        run = 0
        for block in request.blocks:
            if block not in seen:
                break
            run += 1
        missed.append(request.prompt - min(run * BLOCK, request.prompt - 1))
        seen.update(request.blocks)
    return missed


def _salted(salt: bytes, key: bytes) -> bytes:
    return blake2b(salt + key, digest_size=8).digest()


def _key(number: int) -> bytes:
    return blake2b(int(number).to_bytes(8, "little"), digest_size=8).digest()
