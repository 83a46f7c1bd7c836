"""Prompts whose chunks lie in the pools of many nodes, and what these tell the directory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from serve_app.kv.directory import BATCH
from serve_app.kv.directory_table import NAME_BYTES
from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS

CHUNKS_OF_PROMPT = 54  # 13,800 tokens, the mean of Mooncake's conversation trace
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS  # of a chunk


def names(prompt: int) -> list[bytes]:
    """What the chunks of a prompt are entered under."""
    return [_key(prompt, (at + 1) * BLOCKS - 1)[:NAME_BYTES] for at in range(CHUNKS_OF_PROMPT)]


def keys(prompt: int) -> list[bytes]:
    """Of all its blocks, as workers ask."""
    return [_key(prompt, at) for at in range(CHUNKS_OF_PROMPT * BLOCKS)]


def _key(prompt: int, block: int) -> bytes:
    return sha256(b"%d %d" % (prompt, block)).digest()


@dataclass(slots=True)
class World:
    """Which nodes' pools hold which prompts."""

    nodes: int
    held: dict[int, set[int]] = field(default_factory=dict)  # prompt to nodes
    of_node: list[dict[int, None]] = field(default_factory=list)  # prompts, the oldest first

    @classmethod
    def of(cls, prompts: int, nodes: int) -> World:
        world = cls(nodes, of_node=[{} for _ in range(nodes)])
        draw = random.Random(1)
        for prompt in range(prompts):
            copies = 1 + (prompt % 10 == 0) + (prompt % 100 == 0)
            for node in {prompt % nodes, *(draw.randrange(nodes) for _ in range(copies - 1))}:
                world.add(prompt, node)
        return world

    def add(self, prompt: int, node: int) -> None:
        self.held.setdefault(prompt, set()).add(node)
        self.of_node[node][prompt] = None

    def drop(self, prompt: int, node: int) -> None:
        del self.of_node[node][prompt]
        self.held[prompt].discard(node)
        if not self.held[prompt]:
            del self.held[prompt]

    def messages(self, node: int) -> Iterator[list[bytes]]:
        """All that a node has, as its pool tells it to a directory that does not know it."""
        told: list[bytes] = []
        for prompt in self.of_node[node]:
            told += names(prompt)
            while len(told) >= BATCH:
                yield told[:BATCH]
                told = told[BATCH:]
        if told:
            yield told

    def turns(self) -> Iterator[tuple[int, list[bytes]]]:
        """All that all nodes have: a message of each in turn."""
        left = {node: self.messages(node) for node in range(self.nodes)}
        while left:
            for node in list(left):
                message = next(left[node], None)
                if message is None:
                    del left[node]
                else:
                    yield node, message
