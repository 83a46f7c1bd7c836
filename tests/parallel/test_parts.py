"""K/V in parts: whatever division gives them and whatever division takes them, every head of every layer arrives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.kv_cache import KVCache, KVShape, LayerShape
from serve_app.engine.parted import Held, held_whole, needs, part_of, put_parts, take_part
from serve_app.kv.chunk import BadChunk
from serve_app.kv.parts import Payload, block_bytes, check_parts, check_read, together
from serve_app.parallel.cache import CacheShard, first_head, of_whole, whole_shape
from serve_app.parallel.place import Place
from serve_app.wire.parts import Part, Run
from serve_app.wire.ranks import RankLayer

BLOCKS = 7
# Heads, head size, and whether values are columns of keys: as of models whose layers differ.
KINDS = [(4, 4, False), (2, 8, False), (4, 4, False), (1, 6, True), (8, 2, False)]


def shards(kinds: list[tuple[int, int, bool]], place: Place) -> list[CacheShard]:
    """As the ranks of a division hold a model with such layers."""
    found = []
    for rank in range(place.ranks):
        own = Place(place.tensor, place.pipeline, rank)
        stage = range(len(kinds) * own.stage // own.pipeline, len(kinds) * (own.stage + 1) // own.pipeline)
        layers = []
        for index in stage:
            all_heads, dim, shared = kinds[index]
            heads = max(1, all_heads // place.tensor)
            layers.append(RankLayer(index, heads, first_head(own, heads, all_heads), all_heads, dim, shared))
        found.append(CacheShard.of(tuple(layers), torch.float32))
    return found


def fill(cache: KVCache, runs: list[Held], whole: KVCache) -> None:
    """With what a whole cache holds of it."""
    put_parts(cache, runs, list(range(BLOCKS)), as_payload(whole, list(range(BLOCKS))), 0)


def as_payload(whole: KVCache, blocks: list[int]) -> Payload:
    return of_whole(Payload((), (whole.copy_out(blocks).numpy(),)), part_of(held_whole(whole.shape)))


divisions = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3)).map(lambda each: Place(*each))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=3, max_size=7), divisions, divisions, st.randoms(use_true_random=False)
)
def test_every_division_takes_what_any_other_gave(kinds, giving, taking, random):
    shape = KVShape(tuple(LayerShape(*kind) for kind in kinds), torch.float32)
    assert whole_shape(shards(kinds, giving), torch.float32) == shape
    whole = shape.allocate(BLOCKS, "cpu")
    for plane in whole.planes:
        plane.copy_(torch.randn(plane.shape, generator=torch.Generator().manual_seed(random.randrange(1 << 30))))
    sources = [random.randrange(BLOCKS) for _ in range(4)]

    parts, arrays = [], []
    for rank, shard in enumerate(shards(kinds, giving)):
        cache, owned = shard.shape.allocate(BLOCKS, "cpu"), shard.owned(Place(giving.tensor, giving.pipeline, rank))
        fill(cache, shard.runs(), whole)
        parts.append(part_of(owned))
        arrays.append(take_part(cache, owned, sources).numpy())
        assert arrays[-1].nbytes == len(sources) * block_bytes(parts[-1])
    if random.random() < 0.5:  # a rank without keys and values
        parts, arrays = [Part(()), *parts], [np.empty(0, np.uint8), *arrays]
    check_parts(parts, shape.layout.block_bytes)
    assert np.array_equal(together(parts, arrays, len(sources)), whole.copy_out(sources).numpy())

    for shard in shards(kinds, taking):
        cache, wanted = shard.shape.allocate(BLOCKS, "cpu"), shard.shape.allocate(BLOCKS, "cpu")
        fill(wanted, shard.runs(), whole)
        # It reads what it needs and no more.
        reads_all = random.random() < 0.5
        kept = [pair for pair in zip(parts, arrays, strict=True) if reads_all or needs(shard.runs(), pair[0])]
        payload = Payload(tuple(part for part, _ in kept), tuple(array for _, array in kept))
        check_read(payload, sum(array.nbytes for array in arrays), len(sources))
        put_parts(cache, shard.runs(), [5, 2], payload, 1)
        for mine, theirs in zip(cache.planes, wanted.planes, strict=True):
            assert torch.equal(mine[:, :, [5, 2]], theirs[:, :, sources[1:3]])
            assert not mine[:, :, [0, 1, 3, 4, 6]].any()


def test_a_cache_in_one_process_takes_parts():
    shape = KVShape.uniform(2, 4, 4, torch.bfloat16)
    whole, other = shape.allocate(BLOCKS, "cpu"), shape.allocate(BLOCKS, "cpu")
    whole.planes[0].copy_(torch.randn(whole.planes[0].shape))
    halves = [Part((Run(0, 2, first, 2, 2, 8),)) for first in (0, 2)]
    raw = whole.copy_out([3, 4]).numpy().reshape(2, 2, 2, 4, 32, 8)
    arrays = tuple(np.ascontiguousarray(raw[:, :, :, first : first + 2]).reshape(-1) for first in (0, 2))
    other.copy_in([1, 2], Payload(tuple(halves), arrays))
    assert torch.equal(other.planes[0][:, :, [1, 2]], whole.planes[0][:, :, [3, 4]])
    with pytest.raises(ValueError, match="leave out 4 heads"):
        other.copy_in([1, 2], Payload((halves[0],), arrays[:1]))
    with pytest.raises(ValueError, match="do not hold blocks 1 to 3"):
        other.copy_in([1, 2], Payload(tuple(halves), arrays), 1)
    strange = Part((Run(0, 2, 0, 4, 1, 16),))
    with pytest.raises(ValueError, match="of another model"):
        other.copy_in([1, 2], Payload((strange,), (np.concatenate(arrays),)))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [Part((Run(0, 2, 0, 2, 2, 8),))],
        [Part((Run(0, 2, 0, 4, 2, 8),)), Part((Run(0, 1, 2, 2, 2, 8),))],
        [Part((Run(0, 1, 0, 4, 2, 8), Run(2, 1, 0, 4, 2, 8)))],
        [Part((Run(0, 1 << 40, 0, 4, 2, 8),))],
        [Part((Run(-1, 3, 0, 4, 2, 8),))],
        [Part((Run(0, 2, 0, 4, 2, 0),))],
    ],
    ids=["none", "half", "twice", "a gap", "endless", "below zero", "no width"],
)
def test_parts_that_are_no_whole_are_refused(parts):
    with pytest.raises(BadChunk):
        check_parts(parts, 2 * 2 * 4 * 32 * 8)
