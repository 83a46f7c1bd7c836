"""Bodies and answers of several parts: `multipart/form-data` (RFC 7578) and `multipart/mixed` (RFC 2046)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from serve_app.api.errors import InvalidInput

MAX_PARTS = 64
MAX_PART_HEADERS = 8 << 10


@dataclass(slots=True, frozen=True)
class Part:
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


def read_multipart(data: bytes, content_type: str) -> list[Part]:
    """The parts of a body with the header ``content_type``. Raises `InvalidInput`."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if not boundary or len(boundary) > 70:
        raise InvalidInput("The content type of a multipart body must name its boundary.")
    # The first delimiter may stand at the very beginning; behind the last one is nothing to read.
    pieces = (b"\r\n" + data).split(b"\r\n--" + boundary.encode("latin-1"))
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidInput("The multipart body does not end with its boundary.")
    if len(pieces) - 2 > MAX_PARTS:
        raise InvalidInput(f"The body has more than {MAX_PARTS} parts.")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    # Behind a delimiter may be white space, then the line ends.
    head, blank, data = piece.lstrip(b" \t").partition(b"\r\n\r\n")
    if not blank or len(head) > MAX_PART_HEADERS:
        raise InvalidInput("A part of the multipart body has no headers, or too long ones.")
    headers = BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n") + b"\r\n\r\n")
    name = headers.get_param("name", "", "content-disposition")
    if not isinstance(name, str) or not name:
        raise InvalidInput("A part of the multipart body has no name; send multipart/form-data.")
    media_type = headers.get_content_type() if "content-type" in headers else "text/plain"
    return Part(name, data, media_type, headers.get_filename() or "")


def write_multipart(parts: list[Part]) -> tuple[bytes, str]:
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
