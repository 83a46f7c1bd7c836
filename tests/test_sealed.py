"""Kept files are what was written, or nothing."""

from __future__ import annotations

import resource
import stat

import pytest

from serve_app.sealed import read_sealed, write_sealed


def test_what_is_damaged_anywhere_is_not_there(tmp_path):
    path = tmp_path / "kept" / "file"
    assert read_sealed(path) is None
    for data in (b"", b"a\nb", bytes(range(256))):
        write_sealed(path, data)
        assert read_sealed(path) == data
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert read_sealed(path) is None
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert read_sealed(path) is None
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    write_sealed(path, b"again")
    assert read_sealed(path) == b"again" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_keeps_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_sealed(path, b"before")
    size, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(OSError, match="too large"):
            write_sealed(path, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    assert read_sealed(path) == b"before" and list(tmp_path.iterdir()) == [path]
