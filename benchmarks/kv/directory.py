"""The shared cache's directory with many chunks: memory, changes and look-ups a second, and nodes that go and come.

``python -m benchmarks directory [--chunks 10000000] [--nodes 125] [--actor] [--json]``. The product's own table
(``serve_app/kv/directory_table.py``) in this process. Prompts of 54 chunks lie on a node each, one in ten on a second
one as well and one in a hundred on a third. It is filled as by pools that tell all they have, then told what was
published and evicted, a prompt of each a message, and asked as workers ask, with the keys of whole prompts. A node is
lost, and comes back with all it has. Seconds are the process's own CPU time, so that a busy machine does not count.
Each answer must name the nodes that hold the prompt and no other, and nothing may be left of what has gone.

``--actor`` starts a small private Ray and says what one call of the real actor costs it, and how long all pools take to
fill one that was started anew, while workers ask it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.kv.held import BLOCKS, CHUNKS_OF_PROMPT, World, keys, names
from serve_app.kv.directory_table import NODE_TIMEOUT_S, PARTS, DirectoryTable


class Timed:
    """Runs calls and keeps their seconds of CPU time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, call: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = call()
        self.seconds.append(time.process_time() - began)
        return found

    @property
    def whole(self) -> float:
        return sum(self.seconds)

    def longest_ms(self) -> float:
        return round(max(self.seconds) * 1e3, 2)

    def mean_us(self) -> float:
        return round(self.whole / len(self.seconds) * 1e6, 1)


class Trial:
    """One table, and what it should know. ``clock``: its seconds."""

    def __init__(self, world: World, checks: Checks, draw: random.Random) -> None:
        self.world, self.checks, self.draw = world, checks, draw
        self.clock = 0.0
        self.table = DirectoryTable(clock=lambda: self.clock)
        self.pools = ["first"] * world.nodes  # incarnations
        self.next_prompt = len(world.held)

    def tell(self, node: int, added: list[bytes], removed: list[bytes]) -> bool:
        return self.table.update(f"n{node}", self.pools[node], added, removed)

    def fill(self) -> dict[str, Any]:
        before, timed, told = _resident_bytes(), Timed(), 0
        for node, message in self.world.turns():
            timed(lambda node=node, message=message: self.tell(node, message, []))  # type: ignore[misc]
            told += len(message)
        self.checks.equal("names", len(self.table), len(self.world.held) * CHUNKS_OF_PROMPT)
        grown = _resident_bytes() - before
        return {"chunks": len(self.table), "entries": told, "sets": self.table.sets, "process_grew_bytes": grown,
                "bytes_per_chunk": round(grown / len(self.table), 1), "entries_per_s": round(told / timed.whole),
                "longest_message_ms": timed.longest_ms()}  # fmt: skip

    def change(self, messages: int) -> dict[str, Any]:
        """Each message: a prompt was published, and the oldest one evicted."""
        timed = Timed()
        for _ in range(messages):
            node, new = self.draw.randrange(self.world.nodes), self.next_prompt
            self.next_prompt += 1
            old = next(iter(self.world.of_node[node]))
            self.world.drop(old, node)
            self.world.add(new, node)
            added, removed = names(new), names(old)
            timed(lambda node=node, added=added, removed=removed: self.tell(node, added, removed))  # type: ignore[misc]
        self.checks.equal("names after changes", len(self.table), len(self.world.held) * CHUNKS_OF_PROMPT)
        changes = 2 * CHUNKS_OF_PROMPT
        return {"changes_per_message": changes, "us_per_message": timed.mean_us(),
                "changes_per_s": round(messages * changes / timed.whole)}  # fmt: skip

    def look(self, count: int, prompts: list[int]) -> dict[str, Any]:
        timed = Timed()
        for _ in range(count):
            prompt = self.draw.choice(prompts)
            asked = keys(prompt)
            found = timed(lambda asked=asked: self.table.best(asked))  # type: ignore[misc]
            end = CHUNKS_OF_PROMPT * BLOCKS
            wanted = {(f"n{node}", end) for node in self.world.held.get(prompt, ())}
            self.checks.equal("a look-up", set(found), wanted)
        return {"keys": CHUNKS_OF_PROMPT * BLOCKS, "us_per_look": timed.mean_us(),
                "looks_per_s": round(count / timed.whole)}  # fmt: skip

    def lose(self, node: int) -> dict[str, Any]:
        """The node falls silent: nobody is sent there from then on, and its entries are swept."""
        self.clock += NODE_TIMEOUT_S - 1.0
        for other in set(range(self.world.nodes)) - {node}:
            self.tell(other, [], [])
        self.clock += 2.0
        some = next(iter(self.world.of_node[node]))
        for prompt in list(self.world.of_node[node]):
            self.world.drop(prompt, node)
        self.look(1, [some])
        return self.sweep()

    def sweep(self) -> dict[str, Any]:
        """As the actor does it: it answers others between two parts."""
        expire, parts = Timed(), Timed()
        self.checks.that("expiry", expire(self.table.expire), "no node was lost")
        stale = expire(self.table.stale)
        for part in range(PARTS):
            parts(lambda part=part: self.table.sweep(part, stale))  # type: ignore[misc]
        self.checks.equal("names after a sweep", len(self.table), len(self.world.held) * CHUNKS_OF_PROMPT)
        self.checks.equal("sets with a node that has gone", len(self.table.stale()), 0)
        return {"seconds": round(expire.whole + parts.whole, 3), "look_for_sets_ms": expire.longest_ms(),
                "longest_part_ms": parts.longest_ms()}  # fmt: skip

    def rejoin(self, node: int, prompts: list[int]) -> dict[str, Any]:
        """A new pool of the node tells all that it has."""
        self.pools[node] += "'"
        for prompt in prompts:
            self.world.add(prompt, node)
        timed, told = Timed(), 0
        self.checks.that("a new pool", timed(lambda: self.tell(node, [], [])), "it was taken for a known one")
        for message in self.world.messages(node):
            timed(lambda message=message: self.tell(node, message, []))  # type: ignore[misc]
            told += len(message)
        self.look(1, prompts)
        return {"entries": told, "seconds": round(timed.whole, 3), "longest_message_ms": timed.longest_ms()}


def measure(chunks: int, nodes: int, count: int) -> dict[str, Any]:
    """``count`` messages, and look-ups of each kind."""
    world, checks, draw = World.of(max(chunks // CHUNKS_OF_PROMPT, 2 * nodes), nodes), Checks(), random.Random(2)
    trial = Trial(world, checks, draw)
    found: dict[str, Any] = {"nodes": nodes, "fill": trial.fill(), "changes": trial.change(count)}
    found["known_prompts"] = trial.look(count, list(world.held))
    found["unknown_prompts"] = trial.look(count, list(range(trial.next_prompt, trial.next_prompt + 1000)))
    held = list(world.of_node[0])
    found["lost_node"] = trial.lose(0)
    found["rejoined"] = trial.rejoin(0, held)
    found["restarted_pool"] = trial.rejoin(0, held)
    found["restarted_pool"]["sweep"] = trial.sweep()
    for node in range(nodes):
        # One prompt that everybody has: a system prompt.
        world.add(trial.next_prompt, node)
        trial.tell(node, names(trial.next_prompt), [])
    found["prompt_of_all"] = trial.look(max(count // 20, 1), [trial.next_prompt])
    found["sets_at_end"] = trial.table.sets
    wanted = len({frozenset(nodes) for nodes in world.held.values()})
    checks.equal("sets at the end", trial.table.sets, wanted)
    return found | {"answers_checked": checks.require()}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks directory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of all nodes (default 1000000)")
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--messages", type=int, default=2000, help="and look-ups of each kind (default 2000)")
    parser.add_argument("--actor", action="store_true", help="the real actor as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    asked = parser.parse_args(argv)
    found: dict[str, Any] = {"benchmark": "directory", "machine": platform.platform()}
    found |= measure(asked.chunks, asked.nodes, asked.messages)
    if asked.actor:
        from benchmarks.kv.directory_actor import measure_actor

        found["actor"] = measure_actor(World.of(max(asked.chunks // CHUNKS_OF_PROMPT, 1), asked.nodes), asked.messages)
    for name, value in found.items():
        told = value if isinstance(value, dict) else {"": value}
        print(f"{name:16} " + "  ".join(f"{key} {figure}".strip() for key, figure in told.items()))
    if asked.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
