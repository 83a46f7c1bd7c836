"""Files that clients uploaded, and files of results that they may fetch: a row each, beside a blob."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Upload:
    """``id``: 32 hex digits. ``purpose``: "batch" or "batch_output". ``blob``: where its bytes lie; those of results
    belong to their batch. ``print``: SHA-256 of name, purpose and content, in hex; "" for results. Times: unix seconds;
    ``expires`` None: it stays until it is deleted.
    """

    id: str
    account: str
    purpose: str
    name: str
    size: int
    created: float
    blob: str
    expires: float | None = None
    print: str = ""


class UploadStore(Protocol):
    """All calls block and raise `Away`. What has expired is not found."""

    def add(self, upload: Upload) -> Upload:
        """Writes it down, on disk when this returns; the one that there is, where its id is taken already."""

    def find(self, account: str, upload_id: str, now: float) -> Upload | None: ...

    def page(
        self,
        account: str,
        now: float,
        *,
        purpose: str = "",
        after: str = "",
        limit: int = 20,
        oldest_first: bool = False,
    ) -> list[Upload]:
        """In the order in which they were made, the newest first unless told otherwise."""

    def blobs(self) -> set[str]:
        """Names of the blobs of all files of all accounts."""

    def used(self, account: str, now: float) -> int:
        """Bytes of the account's uploads."""

    def delete(self, account: str, upload_id: str) -> bool: ...

    def old(self, now: float, limit: int = 100) -> list[Upload]:
        """Those that have expired."""


def results_id(batch_id: str, kind: str) -> str:
    """The id of a batch's file of results. ``kind``: "output" or "errors"."""
    return hashlib.sha256(f"{batch_id}.{kind}".encode()).hexdigest()[:32]
