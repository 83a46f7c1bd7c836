"""Where ranks stand, and which heads of which layers are theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.kv_cache import KVShape
from serve_app.parallel.cache import CacheShard, first_head, owns, whole_shape
from serve_app.parallel.place import Place
from serve_app.wire.ranks import RankLayer


@given(st.integers(1, 8), st.integers(0, 100))
def test_shares_are_all_and_none_twice(tensor, size):
    shares = [Place(tensor, 1, part).share(size) for part in range(tensor)]
    assert [i for share in shares for i in share] == list(range(size))


def test_stages_and_parts():
    places = [Place(2, 3, rank) for rank in range(6)]
    assert [(p.stage, p.part) for p in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [p.first for p in places] == [True, True, False, False, False, False]
    assert [p.rank for p in places if p.last] == list(places[0].last_ranks) == [4, 5]


def parts(tensor: int, pipeline: int, layers: int, heads: int) -> list[CacheShard]:
    found = []
    for rank in range(tensor * pipeline):
        place, own = Place(tensor, pipeline, rank), max(1, heads // tensor)
        held = range(layers * place.stage // pipeline, layers * (place.stage + 1) // pipeline)
        told = tuple(RankLayer(i, own, first_head(place, own, heads), heads, 4) for i in held)
        found.append(CacheShard.of(told, torch.float32))
    return found


@pytest.mark.parametrize(("tensor", "pipeline", "heads"), [(1, 2, 2), (2, 1, 4), (4, 1, 2), (2, 3, 1), (4, 2, 4)])
def test_every_head_of_every_layer_has_one_owner(tensor, pipeline, heads):
    divided = parts(tensor, pipeline, 6, heads)
    assert whole_shape(divided, torch.float32) == KVShape.uniform(6, heads, 4, torch.float32)
    seen = [
        (layer.layer, head)
        for rank, part in enumerate(divided)
        for layer in part.layers
        if owns(layer, Place(tensor, pipeline, rank))
        for head in range(layer.first_head, layer.first_head + layer.heads)
    ]
    assert sorted(seen) == [(layer, head) for layer in range(6) for head in range(heads)]


def test_ranks_that_disagree_make_no_cache():
    divided = parts(2, 1, 2, 4)
    other = parts(2, 1, 2, 8)
    with pytest.raises(ValueError, match="differ in the cache of layer 0"):
        whole_shape([divided[0], other[1]], torch.float32)
    with pytest.raises(ValueError, match="not all of a model"):
        whole_shape(parts(1, 2, 4, 2)[1:], torch.float32)
