"""Files of clients: whose they are, in which order they come, and how long they stay."""

from __future__ import annotations

from dataclasses import replace

from serve_app.state.blobs.uploads import Upload, results_id


def upload(i: int, account: str = "a", **more) -> Upload:
    return Upload(f"{i:032x}", account, "batch", f"{i}.jsonl", 10 + i, 100.0 + i // 2, f"files/{i}", **more)


def test_an_id_is_taken_once_and_belongs_to_its_account(store):
    first = upload(1, print="p")
    assert store.uploads.add(first) == first
    assert store.uploads.add(replace(first, name="other", print="q")) == first
    assert store.uploads.find("a", first.id, 0.0) == first
    assert store.uploads.find("b", first.id, 0.0) is None
    assert not store.uploads.delete("b", first.id) and store.uploads.delete("a", first.id)
    assert store.uploads.find("a", first.id, 0.0) is None


def test_pages_go_through_all_of_an_account_either_way(store):
    for i in range(7):
        store.uploads.add(upload(i))
    store.uploads.add(upload(9, "b"))
    store.uploads.add(replace(upload(8), purpose="batch_output"))
    for oldest_first in (False, True):
        found, after = [], ""
        while page := store.uploads.page("a", 0.0, purpose="batch", after=after, limit=3, oldest_first=oldest_first):
            found += [int(one.id, 16) for one in page]
            after = page[-1].id
        assert found == (list(range(7)) if oldest_first else list(range(6, -1, -1)))
    assert store.uploads.used("a", 0.0) == sum(10 + i for i in range(7))
    assert not store.uploads.page("b", 0.0, after=upload(1).id)


def test_what_has_expired_is_not_found_and_can_be_cleared(store):
    store.uploads.add(upload(1, expires=50.0))
    store.uploads.add(upload(2))
    assert store.uploads.find("a", upload(1).id, 49.0) and store.uploads.find("a", upload(1).id, 50.0) is None
    assert [one.id for one in store.uploads.page("a", 50.0)] == [upload(2).id] and store.uploads.used("a", 50.0) == 12
    assert [one.id for one in store.uploads.old(50.0)] == [upload(1).id]
    assert results_id("x", "output") != results_id("x", "errors")
