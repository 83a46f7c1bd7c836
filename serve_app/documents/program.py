"""The process that converts one document: reads it from its standard input, writes JSON to its standard output.

``python -m serve_app.documents.program NAME MEDIA_TYPE``. What it reads was written by strangers, so it first gives up
memory, time and the network, and ends with the document.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import zipfile
from io import BytesIO
from typing import Any, NoReturn

from serve_app.documents.formats import (
    CPU_S,
    FILE_BYTES,
    FORMATS,
    MAX_CHARS,
    MAX_ENTRIES,
    MAX_RATIO,
    MAX_UNPACKED,
    MEMORY_BYTES,
    Format,
    format_of,
)

MISSING = (
    "documents are converted by markitdown, which is not installed here; have the operator install it "
    '(pip install "serve-app[documents]") and start the server again'
)


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

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("documents fetch nothing")

    for name in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, refuse)
    socket.getaddrinfo = refuse


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
                        _check_xml(file.read(1 << 16), entry.filename)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError) as error:
        raise Refused(f"it is damaged or encrypted ({type(error).__name__})") from None


def _check_xml(head: bytes, name: str) -> None:
    plain = head.replace(b"\0", b"").lower()
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
    try:
        known = format_of(sys.argv[1], sys.argv[2])
        if known is None:
            raise Refused(f"its format is not known; send one of {', '.join(f.extension for f in FORMATS)}")
        answer = {"text": convert(data, known)}
    except Refused as refused:
        answer = {"error": str(refused)}
    except MemoryError:
        answer = {"error": "it takes too much memory to convert"}
    with told:
        told.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
