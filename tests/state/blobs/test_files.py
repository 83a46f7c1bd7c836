"""Blobs: the same cases on a directory and over S3's protocol, with a server of the tests' own (moto's, which keeps
objects in memory: it shows that the protocol is spoken rightly, and nothing of how a bucket behaves when it fails)."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.network import Proxy
from serve_app.state.blobs import files as module
from serve_app.state.blobs.files import CHUNK, Files, NoFile, Replaced, open_files
from serve_app.state.errors import Away, StateError

BUCKET = "blobs"


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a server that speaks S3's protocol."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where blobs lie in it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    import boto3

    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture(params=["directory", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "files") if request.param == "directory" else request.getfixturevalue("bucket")


@pytest.fixture
def files(where) -> Files:
    return open_files(where)


def test_what_is_put_can_be_read_listed_and_deleted(files, where):
    assert files.list() == [] and files.delete("a/b.txt") is False
    assert files.put("a/b.txt", b"hello") == 5
    assert files.put("a/c/d.txt", b"") == 0
    assert files.put("e.txt", [b"one ", b"two"]) == 7
    assert sorted(files.below("a")) == ["b.txt", "c"] and files.below("none") == []
    # Another gateway sees the same, at once.
    other = open_files(where)
    assert other.get("a/b.txt") == b"hello" and other.get("e.txt") == b"one two" and other.get("a/c/d.txt") == b""
    assert other.list() == ["a/b.txt", "a/c/d.txt", "e.txt"] and other.list("a/c") == ["a/c/d.txt"]
    assert (other.size("a/b.txt"), other.size("a/c/d.txt")) == (5, 0)
    other.put("a/b.txt", b"again")
    assert files.get("a/b.txt") == b"again"
    assert files.delete("a/b.txt") is True and other.list("a/b") == []
    files.put("a/e.txt", b"")
    other.delete_below("a")
    other.delete_below("a")
    assert files.list() == ["e.txt"] and files.list("a/") == []
    for missing in (files.get, files.size, lambda name: list(files.stream(name))):
        with pytest.raises(NoFile):
            missing("a/b.txt")


def test_parts_and_pieces(files):
    data = os.urandom(3 * CHUNK + 17)
    files.put("large", (data[at : at + 100_000] for at in range(0, len(data), 100_000)))
    pieces = list(files.stream("large"))
    assert b"".join(pieces) == data and max(map(len, pieces)) <= CHUNK
    for start, end in ((0, 0), (0, 10), (5, CHUNK + 5), (CHUNK, None), (len(data) - 1, None), (10, len(data) + 50)):
        assert files.get("large", start, end) == data[start:end], (start, end)
    assert files.get("large", len(data) + 5) == b""


def test_a_write_that_fails_leaves_what_was(files):
    files.put("kept", b"before")

    def broken() -> Iterator[bytes]:
        yield b"x" * (9 << 20)  # more than a part of an upload
        raise RuntimeError("the source has gone")

    for name in ("kept", "new"):
        with pytest.raises(RuntimeError, match="the source has gone"):
            files.put(name, broken())
    assert files.get("kept") == b"before" and files.list() == ["kept"]
    with pytest.raises(NoFile):
        files.get("new")


def test_readers_see_the_old_or_the_new(files):
    size = 200_000
    files.put("f", b"0" * size)
    stop = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(files.get("f"))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 10):
        files.put("f", b"%d" % n * size)
    stop.set()
    reader.join()
    assert seen and all(len(data) == size and len(set(data)) == 1 for data in seen)


def test_a_reader_whose_blob_is_replaced_gets_one_version_or_a_word(files):
    """A directory keeps the old one open; a bucket has it no more."""
    size = 8 * CHUNK
    files.put("f", b"1" * size)
    reading = files.stream("f")
    first = next(reading)
    files.put("f", b"2" * size)
    try:
        assert first + b"".join(reading) == b"1" * size
    except Replaced as told:
        assert "read it again" in str(told)
    # Where nothing has been read yet, the new one is.
    assert b"".join(files.stream("f")) == b"2" * size


def test_what_is_replaced_before_its_first_piece_is_read_anew(tmp_path, monkeypatch):
    """As a bucket says it: the object that was opened is no more."""
    files = open_files(str(tmp_path / "files"))
    files.put("f", b"12345")
    tries, pieces = [], files._pieces

    def expired(*asked):
        tries.append(asked)
        if len(tries) < 3:
            raise OSError(errno.EBUSY, "no longer exists")
        yield from pieces(*asked)

    monkeypatch.setattr(files, "_pieces", expired)
    assert b"".join(files.stream("f", 1)) == b"2345" and len(tries) == 3

    def always(*asked):
        yield b"1"
        raise OSError(errno.EBUSY, "no longer exists")

    monkeypatch.setattr(files, "_pieces", always)
    with pytest.raises(Replaced, match="f was replaced"):
        files.get("f", 1)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", ".hidden", "a/.b", "a\0b", "a\\b", "é"])
def test_names_lead_nowhere_else(files, name):
    for use in (files.get, files.delete, files.size, lambda n: files.put(n, b"")):
        with pytest.raises(ValueError, match="is no name"):
            use(name)


def test_a_directory_is_its_owners_alone(tmp_path):
    previous = os.umask(0)
    try:
        open_files(str(tmp_path / "files")).put("a/b.txt", b"x")
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "files").rglob("*")}
    assert modes == {"a": 0o700, "b.txt": 0o600} and stat.S_IMODE((tmp_path / "files").stat().st_mode) == 0o700


def test_other_places_are_refused(monkeypatch):
    for where in ("gs://bucket", "s3://", "http://x/y"):
        with pytest.raises(StateError, match="s3://BUCKET"):
            open_files(where)
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(StateError, match=r"serve-app\[s3\]"):
        open_files("s3://bucket/x")


def ways(files: Files) -> list[Callable[[], object]]:
    """All that can be asked of files that hold ``a/b``."""
    return [
        lambda: files.put("a/c", b"new"),
        lambda: files.put("a/c", iter([b"new"])),
        lambda: files.get("a/b"),
        lambda: files.size("a/b"),
        lambda: files.delete("a/b"),
        lambda: files.delete_below("a"),
    ]


@pytest.mark.parametrize("mode", ["refuse", "silent"])
def test_a_bucket_out_of_reach_is_away_for_a_bounded_time(bucket, s3, monkeypatch, mode):
    proxy = Proxy("127.0.0.1", int(s3.rpartition(":")[2]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    files = open_files(bucket)
    files.put("a/b", b"old")
    proxy.set(mode)
    with monkeypatch.context() as patched:
        patched.setattr(module, "ANSWER_S", 0.1)
        patched.setattr(module, "CONNECT_S", 0.3)
        impatient = open_files(bucket)
        for way in ways(impatient):
            with pytest.raises(Away, match=BUCKET):
                way()
        assert impatient.problem is not None and BUCKET in impatient.problem
    proxy.set("through")
    assert files.get("a/b") == b"old" and files.list() == ["a/b"] and files.problem is None
    proxy.close()


def test_a_disk_that_takes_nothing_is_away_and_a_writer_has_errors_of_its_own(tmp_path):
    files = open_files(str(tmp_path / "files"))
    files.put("a/b", b"old")

    def breaks() -> Iterator[bytes]:
        yield b"new"
        raise ConnectionResetError("its client is gone")

    with pytest.raises(ConnectionResetError):
        files.put("a/b", breaks())
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, most[1]))
    try:
        for data in (bytes(1 << 17), iter([bytes(1 << 15)] * 4)):
            with pytest.raises(Away, match="File too large"):
                files.put("a/b", data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert files.get("a/b") == b"old" and os.listdir(tmp_path / "files" / "a") == ["b"]
