"""Chunks in files: they come back as they were, after a restart as well, or they are misses."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from serve_app.kv.chunk import BadChunk
from serve_app.kv.disk import HEADER_BYTES, DiskTier
from tests.kv.chunks import cut, payload, prompt_keys, root

PROMPT = list(range(700))
METAS = cut(PROMPT, root(), tenant=b"tenant")
SIZE = METAS[0].nbytes


def store(tier: DiskTier, *metas) -> None:
    for meta in metas:
        evicted = tier.begin(meta)
        assert evicted is not None
        tier.delete(evicted)
        assert tier.commit(meta, tier.write(meta, payload(meta)))


def restart(tier: DiskTier, limit: int = 10**9) -> DiskTier:
    tier.close()
    fresh = DiskTier(tier.directory.parent, limit)
    for meta in fresh.scan():
        fresh.delete(fresh.recover(meta))
    return fresh


def files(tier: DiskTier) -> list[str]:
    return sorted(path.stem for path in tier.directory.glob("??/*"))


@pytest.fixture
def tier(tmp_path):
    return DiskTier(tmp_path / "kv", 10**9)


def test_what_is_written_is_mapped_and_survives_a_restart(tier):
    store(tier, *METAS)
    for again in (tier, restart(tier)):
        assert [p.end_token for p in again.index.match(*prompt_keys(PROMPT, root()))] == [256, 512, 700]
        for meta in METAS:
            data = again.read(meta)
            assert np.array_equal(data, payload(meta))
            assert not data.flags.owndata and not data.flags.writeable
            assert again.index.meta(meta.chunk_id) == meta
    assert again.stats.recovered == 3


def test_names_say_nothing_and_only_the_owner_may_read(tier):
    store(tier, *METAS)
    assert files(tier) == sorted(meta.chunk_id for meta in METAS)
    for path in tier.directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    # The same tokens of another tenant have other names.
    assert not {m.chunk_id for m in cut(PROMPT, root("b"))} & set(files(tier))


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(data[:-100])
    else:
        data[{"magic": 0, "header": 40, "payload": HEADER_BYTES + 1000, "last": -1}[how]] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "empty", "short", "magic", "header", "payload", "last"])
def test_a_damaged_file_is_a_miss(tier, how):
    store(tier, *METAS)
    damage(tier.path(METAS[1].chunk_id), how)
    with pytest.raises(BadChunk):
        tier.read(METAS[1])
    tier.forget(METAS[1].chunk_id)
    assert [p.end_token for p in tier.index.match(*prompt_keys(PROMPT, root()))] == [256]
    fresh = restart(tier)
    # A wrong payload shows when it is read: a restart reads headers only.
    if how in ("payload", "last"):
        with pytest.raises(BadChunk):
            fresh.read(METAS[1])
    else:
        assert METAS[1].chunk_id not in fresh.index and METAS[1].chunk_id not in files(fresh)
    assert np.array_equal(fresh.read(METAS[2]), payload(METAS[2]))


def test_a_file_under_another_name_and_leftovers_are_removed(tier):
    store(tier, *METAS)
    first, second = (tier.path(meta.chunk_id) for meta in METAS[:2])
    os.replace(first, second)
    with pytest.raises(BadChunk):
        tier.read(METAS[1])
    second.with_suffix(".new").write_bytes(b"half a chunk")
    fresh = restart(tier)
    assert files(fresh) == [METAS[2].chunk_id]


def test_bytes_stay_within_the_limit_and_the_least_recently_used_goes(tmp_path):
    tier = DiskTier(tmp_path, 3 * SIZE)
    chunks = [cut([n] * 256, root())[0] for n in range(5)]
    store(tier, *chunks[:3])
    tier.index.match(*prompt_keys([0] * 256, root()))
    store(tier, chunks[3])
    assert files(tier) == sorted(c.chunk_id for c in (chunks[0], chunks[2], chunks[3]))
    for when, meta in enumerate((chunks[2], chunks[3], chunks[0])):
        os.utime(tier.path(meta.chunk_id), (when, when))
    # With less room after a restart, what was used last stays.
    smaller = restart(tier, 2 * SIZE)
    assert files(smaller) == sorted(c.chunk_id for c in (chunks[0], chunks[3]))


def test_two_pools_of_one_machine_do_not_share_files(tmp_path):
    one, two = DiskTier(tmp_path, 10**9), DiskTier(tmp_path, 10**9)
    assert one.directory != two.directory
    store(one, *METAS)
    assert files(two) == []
    two.close()
    assert DiskTier(tmp_path, 10**9).directory == two.directory


def test_a_disk_that_refuses_is_left_alone_for_a_while(tier):
    tier.path(METAS[0].chunk_id).parent.write_bytes(b"in the way")
    assert tier.begin(METAS[0]) == []
    assert not tier.commit(METAS[0], tier.write(METAS[0], payload(METAS[0])))
    assert tier.begin(METAS[1]) is None
    assert tier.index.stats.reserved == 0 and tier.counters()["write_failures"] == 1
