"""Small files that can be made again, kept for the next start: whoever reads one gets what was written, or nothing."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

SEAL_BYTES = 65


def write_sealed(path: Path, data: bytes) -> None:
    """Writes ``data`` behind the digits of its SHA-256, private to the user; readers see the old file or the
    new one. Raises :class:`OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(_seal(data) + data)
            file.flush()
            os.replace(file.name, path)
        except OSError:  # a full disk is left as it was
            os.unlink(file.name)
            raise


def read_sealed(path: Path) -> bytes | None:
    """None where there is no such file, and where it is not what was written."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    data = found[SEAL_BYTES:]
    return data if found[:SEAL_BYTES] == _seal(data) else None


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode() + b"\n"
