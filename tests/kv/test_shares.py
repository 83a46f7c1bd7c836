"""What belongs to one tenant stays, whatever the others do."""

from __future__ import annotations

import random

import pytest

from serve_app.kv.eviction import ACTIVE_S
from serve_app.kv.index import ChunkIndex
from serve_app.kv.keys import tenant_id
from tests.kv.chunks import cut, prompt_keys, root

CHUNK = cut([0] * 256, root())[0].nbytes
HOSTILE, LIGHT = b"hostile", b"light"


def publish(index: ChunkIndex, tenant: bytes, number: int) -> bool:
    [meta] = cut([number] * 256, root(tenant.hex()), tenant=tenant_id(tenant))
    return index.reserve(meta) is not None and index.commit(meta, meta.chunk_id)


def found(index: ChunkIndex, tenant: bytes, numbers) -> list[int]:
    held = {meta for chunk_id in index.chunk_ids if (meta := index.meta(chunk_id))}
    return [n for n in numbers if cut([n] * 256, root(tenant.hex()), tenant=tenant_id(tenant))[0] in held]


def test_a_flood_takes_no_more_than_what_nobody_is_guaranteed():
    index = ChunkIndex(20 * CHUNK)
    assert all(publish(index, LIGHT, n) for n in range(8))
    assert all(publish(index, HOSTILE, n) for n in range(500))
    # Two tenants share half of twenty chunks: five each. The oldest three of the light one's eight had to go.
    assert found(index, LIGHT, range(8)) == [3, 4, 5, 6, 7]
    assert found(index, HOSTILE, range(500)) == list(range(485, 500))


def test_what_is_within_the_share_stays_even_if_it_is_older_than_everything():
    index = ChunkIndex(20 * CHUNK)
    assert all(publish(index, LIGHT, n) for n in range(3))
    for n in range(200):
        assert publish(index, HOSTILE, n)
        index.match(*prompt_keys([n] * 256, root(HOSTILE.hex())))
    assert found(index, LIGHT, range(3)) == [0, 1, 2]


def test_many_names_shrink_the_shares_but_take_none_away():
    index = ChunkIndex(40 * CHUNK)
    assert all(publish(index, LIGHT, n) for n in range(4))
    for n in range(60):
        publish(index, b"name %d" % (n % 4), n)
    assert found(index, LIGHT, range(4)) == [0, 1, 2, 3]


def test_alone_a_tenant_has_it_all_and_without_a_guarantee_the_oldest_goes():
    index = ChunkIndex(20 * CHUNK)
    assert all(publish(index, LIGHT, n) for n in range(30))
    assert found(index, LIGHT, range(30)) == list(range(10, 30))
    index = ChunkIndex(20 * CHUNK, guaranteed=0.0)
    assert all(publish(index, LIGHT, n) for n in range(5)) and all(publish(index, HOSTILE, n) for n in range(20))
    assert found(index, LIGHT, range(5)) == []


def test_a_tenant_that_is_gone_has_no_guarantee():
    now = [0.0]
    index = ChunkIndex(20 * CHUNK, clock=lambda: now[0])
    assert all(publish(index, LIGHT, n) for n in range(3))
    now[0] = ACTIVE_S + 1
    assert all(publish(index, HOSTILE, n) for n in range(20))
    assert found(index, LIGHT, range(3)) == []
    assert index.active_tenants == 1


def test_others_chunks_that_are_read_now_are_not_the_way_out():
    index = ChunkIndex(4 * CHUNK, guaranteed=1.0)
    assert publish(index, LIGHT, 0) and publish(index, LIGHT, 1)
    assert publish(index, HOSTILE, 0) and publish(index, HOSTILE, 1)
    pins = index.pin(index.chunk_ids[2:])
    assert not publish(index, HOSTILE, 2)
    index.unpin(pins)
    assert publish(index, HOSTILE, 2) and found(index, LIGHT, range(2)) == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_pushed_below_the_share_whatever_happens(seed):
    rng = random.Random(seed)
    index = ChunkIndex(30 * CHUNK)
    names = [b"%d" % n for n in range(5)]
    shares = {name: 0 for name in names}
    for name in names:
        publish(index, name, 0)
    for step in range(600):
        name = rng.choices(names, [20, 3, 1, 1, 1])[0]
        before = {n: len(found_of(index, n)) for n in names}
        publish(index, name, step)
        for other in names:
            shares[other] = len(found_of(index, other))
            if other != name:
                assert shares[other] >= min(before[other], 3)
        assert sum(shares.values()) * CHUNK <= index.limit_bytes


def found_of(index: ChunkIndex, tenant: bytes) -> list[str]:
    return [i for i in index.chunk_ids if index.meta(i).tenant == tenant_id(tenant)]  # type: ignore[union-attr]
