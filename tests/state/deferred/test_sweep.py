"""What is dropped in time: batches, files of clients, and blobs of processes that died before they said whose they
are.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from serve_app.state.blobs.files import open_files
from serve_app.state.blobs.uploads import Upload
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.sweep import LOOK_S, Sweep
from tests.state.deferred.test_batches import BATCH


def test_what_has_expired_goes_with_its_blobs(store, tmp_path):
    files = open_files(str(tmp_path / "files"))
    for name, expires in (("old", 10.0), ("kept", None)):
        files.put(f"files/{name}", b"x")
        store.uploads.add(Upload(name, "a", "batch", "in.jsonl", 1, 1.0, f"files/{name}", expires))
    Sweep(store.batches, store.uploads, lambda: files).turn(11.0, time.monotonic() + 60)
    assert files.list() == ["files/kept"] and [each.id for each in store.uploads.page("a", 0.0)] == ["kept"]


def test_blobs_that_belong_to_nothing_for_a_while_are_deleted(store, tmp_path):
    files = open_files(str(tmp_path / "files"))
    store.batches.create(replace(BATCH, id="there", caller=Caller("a")))
    store.uploads.add(Upload("there", "a", "batch", "in.jsonl", 1, 1.0, "files/there"))
    names = ["batches/lost/input.json", "batches/there/input.json", "files/lost", "files/there"]
    for name in names:
        files.put(name, b"x")
    now = time.time()
    for name, age in ((".draft-1", 0.0), (".draft-2", 2 * LOOK_S)):
        (tmp_path / "files" / "files" / name).touch()
        os.utime(tmp_path / "files" / "files" / name, (now - age, now - age))
    sweep = Sweep(store.batches, store.uploads, lambda: files)
    sweep.look(now)
    assert files.list() == names
    # Somebody has said meanwhile whose this is.
    files.put("batches/late/input.json", b"x")
    sweep.look(now)
    store.batches.create(replace(BATCH, id="late", caller=Caller("a")))
    assert files.list() == ["batches/late/input.json", "batches/there/input.json", "files/there"]
    sweep.look(now)
    sweep.look(now)
    assert files.list() == ["batches/late/input.json", "batches/there/input.json", "files/there"]
    assert sorted(each.name for each in (tmp_path / "files" / "files").iterdir()) == [".draft-1", "there"]
