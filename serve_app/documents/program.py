"""The process that converts one document: reads it from its standard input, writes to its standard output what it says.

``python -m serve_app.documents.program EXTENSION``. What it reads was written by strangers, so it first gives up
memory, time and the network, and ends with the document.
"""

from __future__ import annotations

import os
import resource
import sys
import zipfile
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from serve_app.documents.formats import (
    CPU_S,
    ERROR,
    FILE_BYTES,
    FORMATS,
    MAX_CHARS,
    MAX_ENTRIES,
    MAX_RATIO,
    MAX_UNPACKED,
    MEMORY_BYTES,
    TEXT,
    Format,
)

MISSING = (
    "documents are converted by markitdown, which is not installed here; have the operator install it "
    '(pip install "serve-app[documents]") and start the server again'
)


# Streams of others are read on the same processors.
NICE = 10


class Refused(ValueError):
    """A document that is not converted; the text is for the client."""


def restrict() -> None:
    """Bounds that the kernel keeps, and no connections: a document may name what lies elsewhere."""
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    with suppress(OSError):
        # Where the machine runs out of memory, this process is the first to go.
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.nice(NICE)
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    """What Python asks before it does something: whatever a document names, its reader goes nowhere and opens nothing
    but what it consists of itself.
    """
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind"):
        raise OSError("documents fetch nothing")
    if event == "open" and isinstance(args[0], str | bytes):
        path = os.path.realpath(os.fsdecode(args[0]))
        if not path.startswith(_own()):
            raise PermissionError("documents open no files")


@cache
def _own() -> tuple[str, ...]:
    """Folders of Python, of its packages and of the system; of other processes nothing."""
    packages = (sys.prefix, sys.base_prefix, *filter(None, sys.path))
    places = {os.path.realpath(place) for place in (*packages, "/usr", "/lib", "/lib64", "/dev", "/proc/self", "/sys")}
    files = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/etc/mime.types", "/etc/localtime", "/etc/os-release")
    return tuple(f"{place}/" for place in places - {"/"}) + files


def check_archive(data: bytes) -> None:
    """Refuses archives that unpack to far more than they are, and XML that declares entities: no office program writes
    any.
    """
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if len(entries) > MAX_ENTRIES or unpacked > MAX_UNPACKED or unpacked > MAX_RATIO * len(data) + (1 << 20):
                raise Refused(
                    f"it unpacks to {len(entries)} files of {unpacked} bytes; at most {MAX_ENTRIES} of {MAX_UNPACKED} "
                    f"bytes, and {MAX_RATIO} times its own size, are taken"
                )
            for entry in entries:
                if entry.filename.lower().endswith((".xml", ".rels", ".xhtml", ".opf", ".ncx", ".vml")):
                    with archive.open(entry) as file:
                        _check_xml(file.read(), entry.filename)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError) as error:
        raise Refused(f"it is damaged or encrypted ({type(error).__name__})") from None


def _check_xml(text: bytes, name: str) -> None:
    plain = text.replace(b"\0", b"").lower()
    if b"<!entity" in plain or (b"<!doctype" in plain and b"[" in plain.partition(b"<!doctype")[2].partition(b">")[0]):
        raise Refused(f"{name[:80]} declares entities, which are not read")


def convert(data: bytes, known: Format) -> str:
    """The document as Markdown. Raises :class:`Refused`."""
    if known.zipped:
        check_archive(data)
    elif known.extension == ".pdf" and b"%PDF-" not in data[:1024]:
        raise Refused("it is no PDF")
    try:
        from markitdown import StreamInfo, converters
    except ImportError:
        raise Refused(MISSING) from None
    told = StreamInfo(extension=known.extension, mimetype=known.media_type, charset=_charset(data, known))
    try:
        found = getattr(converters, known.converter)().convert(BytesIO(data), told)
    except MemoryError:
        raise Refused("it takes too much memory to convert") from None
    except Exception as error:  # libraries raise whatever their formats have made them raise
        raise Refused(f"it can't be read ({type(error).__name__})") from None
    text: str = found.markdown
    if len(text) > MAX_CHARS:
        raise Refused(f"it has {len(text)} characters as Markdown; at most {MAX_CHARS} are taken. Send it in parts")
    return text


def _charset(data: bytes, known: Format) -> str | None:
    """Of texts: UTF-8 where that fits. Others are guessed by the converter."""
    if known.zipped or known.extension == ".pdf":
        return None
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return "utf-8"


def main() -> None:
    # Libraries that print must not write into the answer.
    told = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    data = sys.stdin.buffer.read()
    restrict()
    known = next(known for known in FORMATS if known.extension == sys.argv[1])
    try:
        kind, answer = TEXT, convert(data, known)
    except Refused as refused:
        kind, answer = ERROR, str(refused)
    except MemoryError:
        kind, answer = ERROR, "it takes too much memory to convert"
    # Some readers make halves of characters, which no answer can hold.
    with told:
        told.write(kind + answer.encode(errors="replace"))


if __name__ == "__main__":
    main()
