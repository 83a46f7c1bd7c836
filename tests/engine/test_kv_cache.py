"""The cache's memory: what a layer is, what a block's payload is, and that layers may differ."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.kv_cache import KVCache, KVShape, LayerShape

SAME = KVShape.uniform(3, 2, 16, torch.bfloat16)
MIXED = KVShape((LayerShape(2, 16), LayerShape(2, 16), LayerShape(1, 48), LayerShape(2, 16)), torch.float32)


def filled(shape: KVShape, blocks: int = 7) -> KVCache:
    cache = shape.allocate(blocks, "cpu")
    for plane in cache.planes:
        plane.copy_(torch.randn(plane.shape))
    return cache


def test_sizes():
    assert SAME.block_bytes == 3 * 2 * 2 * 32 * 16 * 2
    assert MIXED.block_bytes == (3 * 2 * 16 + 48) * 2 * 32 * 4
    for shape in (SAME, MIXED):
        cache = shape.allocate(5, "cpu")
        assert sum(p.nbytes for p in cache.planes) == 5 * shape.block_bytes
        assert shape.layout.block_bytes == shape.block_bytes
    assert SAME.same == LayerShape(2, 16) and MIXED.same is None


def test_layers_of_one_shape_lie_one_behind_the_other():
    """Which compiled code relies on."""
    [plane] = SAME.allocate(5, "cpu").planes
    assert plane.shape == (3, 2, 5, 2, 32, 16) and plane.is_contiguous()


def test_every_layer_has_memory_of_its_own_shape():
    cache = MIXED.allocate(5, "cpu")
    assert [tuple(cache.layer(i).shape) for i in range(4)] == [(2, 5, s.kv_heads, 32, s.head_dim) for s in MIXED.layers]
    for index in range(4):
        assert cache.layer(index).is_contiguous()
        cache.layer(index).fill_(index + 1)
    assert [float(cache.layer(i).mean()) for i in range(4)] == [1, 2, 3, 4]


def test_more_layers_come_behind():
    more = SAME.with_more([LayerShape(2, 16)])
    assert len(more.layers) == 4 and more.layout != SAME.layout


@pytest.mark.parametrize("shape", [SAME, MIXED], ids=["same", "mixed"])
def test_blocks_travel(shape):
    source, target = filled(shape), filled(shape)
    before = [target.layer(i).clone() for i in range(len(shape.layers))]
    payload = source.copy_out([4, 1, 6])
    assert payload.dtype == torch.uint8 and payload.shape == (3 * shape.block_bytes,)
    target.copy_in([2, 5], payload, first=1)
    for index in range(len(shape.layers)):
        wanted = before[index].clone()
        wanted[:, [2, 5]] = source.layer(index)[:, [1, 6]]
        assert torch.equal(target.layer(index), wanted)


def test_chunks_of_layers_with_states_alone_are_as_large_as_their_layout_says():
    """The pool takes no others, and such chunks say how far a prompt's states go."""
    shape = KVShape((), torch.float32)
    cache = shape.allocate(8, "cpu")
    payload = cache.copy_out([1, 5, 7])
    assert payload.numel() == 3 * shape.layout.block_bytes == 3
    cache.copy_in([0, 2, 3], payload)


def test_a_payload_is_a_copy():
    cache = filled(SAME)
    payload = cache.copy_out([3])
    cache.planes[0].zero_()
    assert payload.any()


def test_float8_travels():
    shape = KVShape.uniform(2, 1, 16, torch.float8_e4m3fn)
    source, target = filled(shape), shape.allocate(7, "cpu")
    target.copy_in([1], source.copy_out([3]))
    assert torch.equal(target.planes[0].float()[:, :, 1], source.planes[0].float()[:, :, 3])


@pytest.mark.parametrize(("size", "first"), [(2 * SAME.block_bytes, 1), (2 * SAME.block_bytes - 1, 0)])
def test_a_payload_of_another_size_is_refused(size, first):
    cache = filled(SAME)
    before = cache.planes[0].clone()
    with pytest.raises(ValueError, match="does not hold"):
        cache.copy_in([1, 2], torch.zeros(size, dtype=torch.uint8), first)
    assert torch.equal(cache.planes[0], before)


def test_ranks_do_not_share_chunks():
    one = KVShape(SAME.layers, SAME.dtype, rank=1, ranks=2)
    assert one.layout != SAME.layout != KVShape(SAME.layers, SAME.dtype, rank=0, ranks=2).layout
