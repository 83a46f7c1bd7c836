"""Properties of the block pool: whatever is done, the books balance and nothing in use is given away."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve_app.engine.blocks import BlockPool, blocks_for


class Pool(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(1, 5))
    def allocate(self, count):
        if not self.pool.can_allocate(count):
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert not set(blocks) & {b for t in self.tables for b in t}
        for block in blocks:
            self.content.pop(block, None)
        self.tables.append(blocks)

    @rule(key=st.integers(0, 8), which=st.integers(0, 100))
    def seal(self, key, which):
        if self.tables:
            table = self.tables[which % len(self.tables)]
            block = table[which % len(table)]
            name = bytes([key])
            if name not in self.content.values() and block not in self.content:
                self.content[block] = name
            self.pool.seal(block, name)

    @rule(key=st.integers(0, 8))
    def share(self, key):
        blocks = self.pool.match([bytes([key])])
        assert bool(blocks) == (bytes([key]) in self.content.values())
        if blocks:
            assert self.content[blocks[0]] == bytes([key])
            self.pool.take(blocks)
            self.tables.append(blocks)

    @rule(which=st.integers(0, 100))
    def release(self, which):
        if self.tables:
            self.pool.release(self.tables.pop(which % len(self.tables)))

    @invariant()
    def balanced(self):
        self.pool.check()
        assert self.pool.used_blocks == len({b for t in self.tables for b in t})


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_least_recently_used_prefix_goes_first():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    for name, blocks in (("a", first), ("b", second)):
        for index, block in enumerate(blocks):
            pool.seal(block, f"{name}{index}".encode())
    pool.release(first)
    pool.release(second)
    pool.allocate(1)
    # The tail of the older prefix was given away, its head is still a hit.
    assert pool.match([b"a0", b"a1"]) == first[:1]
    assert pool.match([b"b0", b"b1"]) == second


def test_blocks_for():
    assert [blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_keys_that_are_forgotten_can_be_told():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for number, block in enumerate(blocks):
        pool.seal(block, bytes([number]))
    pool.release(blocks)
    assert not pool.evicted and pool.holds(b"\x03")
    # The end of a chain goes first.
    pool.allocate(2)
    assert list(pool.evicted) == [b"\x03", b"\x02"] and not pool.holds(b"\x03")
    pool.clear_cache()
    assert set(pool.evicted) == {bytes([n]) for n in range(4)}
