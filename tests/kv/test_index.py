from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from serve_app.kv.chunk import BadChunk, ChunkMeta, Layout, check_payload
from serve_app.kv.index import ChunkIndex
from serve_app.kv.keys import BLOCK_TOKENS
from serve_app.wire.publish import ChunkFields, PublishCall, read_publish_call
from tests.kv.chunks import cut, payload, prompt_keys, root

PROMPT = list(range(700))  # chunks of 256, 256 and 188 tokens: 5 blocks and a tail of 28


def add(index: ChunkIndex, *metas: ChunkMeta) -> None:
    for meta in metas:
        assert index.reserve(meta) is not None
        assert index.commit(meta, meta.chunk_id)


def test_a_whole_prompt_with_its_tail_is_found():
    index = ChunkIndex(10**9)
    metas = cut(PROMPT, root())
    add(index, *metas)
    pieces = index.match(*prompt_keys(PROMPT, root()))
    assert [p.chunk_id for p in pieces] == [m.chunk_id for m in metas]
    assert [(p.start_token, p.n_tokens, p.n_blocks) for p in pieces] == [
        (0, 256, 8),
        (256, 256, 8),
        (512, 188, 6),
    ]


def test_a_prompt_that_branches_off_uses_part_of_a_chunk():
    index = ChunkIndex(10**9)
    add(index, *cut(PROMPT, root()))
    other = PROMPT[:360] + [9] * 100
    pieces = index.match(*prompt_keys(other, root()))
    assert [(p.start_token, p.end_token) for p in pieces] == [(0, 256), (256, 352)]


def test_what_the_engine_has_is_skipped():
    index = ChunkIndex(10**9)
    add(index, *cut(PROMPT, root()))
    keys, tails = prompt_keys(PROMPT, root())
    pieces = index.match(keys, tails, start_block=10)
    assert [(p.start_token, p.first_block, p.end_token) for p in pieces] == [(320, 2, 512), (512, 0, 700)]
    assert [p.end_token for p in index.match(keys, tails, start_block=len(keys))] == [700]


def test_a_gap_ends_the_match_and_another_tenant_finds_nothing():
    index = ChunkIndex(10**9)
    first, _, last = cut(PROMPT, root())
    add(index, first, last)
    assert sum(p.n_tokens for p in index.match(*prompt_keys(PROMPT, root()))) == 256
    assert index.match(*prompt_keys(PROMPT, root("b"))) == []


def test_a_shorter_chunk_stays_useful_for_its_tail_and_the_longer_one_wins():
    index = ChunkIndex(10**9)
    short, long = PROMPT[:300], PROMPT[:512]
    add(index, *cut(short, root()))
    (_, longer) = cut(long, root())
    add(index, longer)
    assert [p.end_token for p in index.match(*prompt_keys(long, root()))] == [256, 512]
    assert [p.end_token for p in index.match(*prompt_keys(short, root()))] == [256, 300]
    index.remove(longer.chunk_id)
    assert [p.end_token for p in index.match(*prompt_keys(short, root()))] == [256, 300]


def test_the_same_keys_twice_are_dropped():
    index = ChunkIndex(10**9)
    (meta,) = cut(PROMPT[:64], root())
    add(index, meta)
    assert index.reserve(meta) is None
    assert index.reserve(cut(PROMPT[:32], root())[0]) is None
    assert index.stats.duplicates == 2 and len(index) == 1


def test_a_chain_is_evicted_from_its_end():
    metas = cut(PROMPT[:768], root(), size=128)
    index = ChunkIndex(sum(m.nbytes for m in metas))
    add(index, *metas)
    index.match(*prompt_keys(PROMPT, root()))
    add(index, *cut([7] * 256, root()))
    kept = [p.end_token for p in index.match(*prompt_keys(PROMPT, root()))]
    assert kept == [128, 256, 384]


def test_what_a_longer_chunk_replaces_goes_first():
    tokens = PROMPT[:256]
    shorter, longer = cut(tokens[:100], root())[0], cut(tokens[:192], root())[0]
    other = cut([7] * 64, root())[0]
    index = ChunkIndex(shorter.nbytes + longer.nbytes + other.nbytes)
    add(index, other, shorter, longer)
    assert index.chunk_ids == [shorter.chunk_id, other.chunk_id, longer.chunk_id]
    # Its tail still serves those that ask for the same prompt again.
    assert [p.end_token for p in index.match(*prompt_keys(tokens[:100], root()))] == [100]


def test_no_room_beside_pinned_chunks():
    (meta,) = cut(PROMPT[:64], root())
    (other,) = cut([5] * 64, root())
    index = ChunkIndex(meta.nbytes)
    add(index, meta)
    pins = index.pin([meta.chunk_id])
    assert index.reserve(other) is None and index.stats.refused == 1
    index.unpin(pins)
    index.unpin(pins)
    add(index, other)
    assert index.chunk_ids == [other.chunk_id]


def test_a_round_trip_and_what_is_refused():
    meta = cut(PROMPT[:300], root())[1]
    assert ChunkMeta.from_fields(meta.to_fields()) == meta
    [told] = read_publish_call(PublishCall((ChunkFields(**meta.to_fields()),)).encode()).chunks
    assert ChunkMeta.from_fields(structs.asdict(told)) == meta
    for change in (
        {"n_tokens": 45 + BLOCK_TOKENS},
        {"nbytes": meta.nbytes - 1},
        {"tail_key": None},
        {"layout": 3},
        {"nbytes": 0},
        {"start_token": 250},
        {"block_keys": 3},
        {"surprise": 1},
    ):
        with pytest.raises(BadChunk):
            ChunkMeta.from_fields({**meta.to_fields(), **change})


def test_a_payload_must_have_the_right_size_and_type():
    meta = cut(PROMPT[:300], root())[1]
    good = payload(meta)
    assert check_payload(good, meta.nbytes) is good
    for bad in (good[:-1], good.view("int8"), good.reshape(2, -1), good.tobytes(), None):
        with pytest.raises(BadChunk):
            check_payload(bad, meta.nbytes)


def test_a_layout_names_what_two_caches_must_share():
    same = Layout.of([(2, 8)] * 3, "bfloat16", 2)
    assert (same.name, same.block_bytes) == ("L3.H2.D8.B32.bfloat16", 3 * 2 * 2 * 32 * 8 * 2)
    mixed = Layout.of([(2, 8), (2, 8), (1, 16)], "bfloat16", 2)
    assert (mixed.name, mixed.block_bytes) == ("L2.H2.D8+L1.H1.D16.B32.bfloat16", same.block_bytes)
    assert Layout.of([(2, 8)], "bfloat16", 2, 1, 2).name == "L1.H2.D8.B32.bfloat16.R1of2"


class IndexMachine(RuleBasedStateMachine):
    """Random traffic against the promises: bytes within the limit, no match of what is gone, pins hold."""

    PROMPTS = [[seed] * 96 + [seed + tail] * 200 for seed in range(3) for tail in range(4)]
    METAS = [meta for prompt in PROMPTS for size in (128, 256) for meta in cut(prompt, root(), size=size)]

    @initialize(chunks=st.integers(1, 12))
    def start(self, chunks):
        self.index = ChunkIndex(chunks * max(m.nbytes for m in self.METAS))
        self.reserved: list[ChunkMeta] = []
        self.pins: list = []
        self.evicted: set[str] = set()

    @rule(meta=st.sampled_from(METAS))
    def reserve(self, meta):
        pinned = {entry.meta.chunk_id for pins in self.pins for entry in pins.entries}
        out = self.index.reserve(meta)
        if out is not None:
            self.reserved.append(meta)
            assert not pinned & {gone.meta.chunk_id for gone in out}
            assert all(gone.meta.chunk_id not in self.index for gone in out)

    @rule(data=st.data(), works=st.booleans())
    def finish(self, data, works):
        if self.reserved:
            meta = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
            if works:
                assert self.index.commit(meta, meta.chunk_id)
            else:
                self.index.cancel(meta)

    @rule(prompt=st.sampled_from(PROMPTS), start=st.integers(0, 9), pin=st.booleans())
    def match(self, prompt, start, pin):
        keys, tails = prompt_keys(prompt, root())
        pieces = self.index.match(keys, tails, start)
        at = start * BLOCK_TOKENS
        for piece in pieces:
            assert self.index.value(piece.chunk_id) == piece.chunk_id
            assert piece.start_token == at
            at = piece.end_token
            meta = self.index.meta(piece.chunk_id)
            first = piece.start_token // BLOCK_TOKENS
            full = piece.n_tokens // BLOCK_TOKENS
            assert list(meta.block_keys[piece.first_block :][:full]) == keys[first : first + full]
            assert (piece.n_tokens % BLOCK_TOKENS == 0) or (meta.tail_key == tails[0] and at == len(prompt))
        if at // BLOCK_TOKENS < len(keys):
            assert not self.index.holds_all([keys[at // BLOCK_TOKENS]])
        if pin:
            self.pins.append(self.index.pin(dict.fromkeys(p.chunk_id for p in pieces)))

    @rule()
    def unpin(self):
        if self.pins:
            self.index.unpin(self.pins.pop())

    @rule(meta=st.sampled_from(METAS))
    def remove(self, meta):
        self.index.remove(meta.chunk_id)
        assert meta.chunk_id not in self.index

    @invariant()
    def bytes_add_up(self):
        if hasattr(self, "index"):
            held = sum(self.index.meta(c).nbytes for c in self.index.chunk_ids)
            assert self.index.stats.bytes == held
            assert self.index.stats.reserved == sum(m.nbytes for m in self.reserved)
            assert held + self.index.stats.reserved <= self.index.limit_bytes


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
