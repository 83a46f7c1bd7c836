"""Bodies and answers of several parts: `multipart/form-data` (RFC 7578) and `multipart/mixed` (RFC 2046)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from serve_app.api.errors import InvalidInput

MAX_PARTS = 64
MAX_PART_HEADERS = 8 << 10


@dataclass(slots=True, frozen=True)
class BodyPart:
    """One part. ``filename`` is "" for a field of text."""

    name: str
    data: bytes
    media_type: str = "application/octet-stream"
    filename: str = ""

    @property
    def text(self) -> str:
        """The data as UTF-8. Raises `InvalidInput`."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise InvalidInput(f"{self.name} must be text in UTF-8.", param=self.name[:64]) from None


def read_multipart(data: bytes, content_type: str) -> list[BodyPart]:
    """The parts of a body with the header ``content_type``. Raises `InvalidInput`."""
    # The first delimiter may stand at the very beginning; behind the last one is nothing to read.
    pieces = (b"\r\n" + data).split(b"\r\n--" + _boundary(content_type), MAX_PARTS + 2)
    if len(pieces) - 2 > MAX_PARTS:
        raise InvalidInput(f"The body has more than {MAX_PARTS} parts.")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidInput("The multipart body does not end with its boundary.")
    return [_part(piece) for piece in pieces[1:-1]]


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if not boundary or len(boundary) > 70 or not boundary.isascii():
        raise InvalidInput("The content type of a multipart body must name its boundary.")
    return boundary.encode()


def _part(piece: bytes) -> BodyPart:
    # Behind a delimiter may be white space, then the line ends.
    head, blank, data = piece.lstrip(b" \t").partition(b"\r\n\r\n")
    if not blank or len(head) > MAX_PART_HEADERS:
        raise InvalidInput("A part of the multipart body has no headers, or too long ones.")
    headers = BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n") + b"\r\n\r\n")
    name = headers.get_param("name", "", "content-disposition")
    if not isinstance(name, str) or not name:
        raise InvalidInput("A part of the multipart body has no name; send multipart/form-data.")
    media_type = headers.get_content_type() if "content-type" in headers else "text/plain"
    return BodyPart(name, data, media_type, headers.get_filename() or "")


def write_multipart(parts: list[BodyPart]) -> tuple[bytes, str]:
    """``parts`` as one body, and its content type."""
    boundary = secrets.token_hex(16)
    out = []
    for part in parts:
        filename = f'; filename="{_quoted(part.filename)}"' if part.filename else ""
        disposition = f'Content-Disposition: form-data; name="{_quoted(part.name)}"{filename}'
        head = f"--{boundary}\r\n{disposition}\r\nContent-Type: {part.media_type}\r\n\r\n"
        out += [head.encode(), part.data, b"\r\n"]
    return b"".join([*out, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "")


@dataclass(slots=True)
class StreamedPart:
    """A part whose data comes in ``pieces``, which are to be taken before the next part."""

    name: str
    filename: str
    pieces: Iterator[bytes]


def stream_multipart(pieces: Iterator[bytes], content_type: str) -> Iterator[StreamedPart]:
    """The parts of a body that comes in ``pieces``, of which little more than one is held. Raises `InvalidInput`."""
    return _Stream(pieces, b"\r\n--" + _boundary(content_type)).parts()


class _Stream:
    def __init__(self, pieces: Iterator[bytes], delimiter: bytes) -> None:
        self._pieces = pieces
        self._delimiter = delimiter
        # The first delimiter may stand at the very beginning.
        self._buffer = b"\r\n"

    def parts(self) -> Iterator[StreamedPart]:
        for _ in self._until():  # what stands before the first part is nothing to read
            pass
        for _ in range(MAX_PARTS):
            if self._at_least(2).startswith(b"--"):
                return
            part = _part(self._head())
            data = self._until()
            yield StreamedPart(part.name, part.filename, data)
            for _ in data:
                pass
        if not self._at_least(2).startswith(b"--"):
            raise InvalidInput(f"The body has more than {MAX_PARTS} parts.")

    def _until(self) -> Iterator[bytes]:
        """The data up to the next delimiter, and behind it."""
        while (at := self._buffer.find(self._delimiter)) < 0:
            safe = len(self._buffer) - len(self._delimiter) + 1
            if safe > 0:
                yield self._buffer[:safe]
                self._buffer = self._buffer[safe:]
            self._more()
        if at:
            yield self._buffer[:at]
        self._buffer = self._buffer[at + len(self._delimiter) :]

    def _head(self) -> bytes:
        while (at := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_PART_HEADERS:
                raise InvalidInput("A part of the multipart body has no headers, or too long ones.")
            self._more()
        head = self._buffer[: at + 4]
        self._buffer = self._buffer[at + 4 :]
        return head

    def _at_least(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        return self._buffer

    def _more(self) -> None:
        piece = next(self._pieces, b"")
        if not piece:
            raise InvalidInput("The multipart body does not end with its boundary.")
        self._buffer += piece
