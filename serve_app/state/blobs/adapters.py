"""Adapters (LoRA): who owns which, and what is asked of a store. Their files are blobs, named after their content.

An adapter belongs to an account and is made for one model. Its files come one by one; when both are there and have been
checked they are its first version. A later version is opened, filled and checked beside the one that is served, and
takes its place in one step. Who runs with an older one goes on with it: files stay for :data:`KEPT_S` after the last
adapter that had them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from serve_app.state.errors import StateError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Longer than a stream can be away, or a batch take, and go on with the version it began with.
KEPT_S = 26 * 3600.0
Order = Literal["created", "modified", "name"]
Status = Literal["waiting", "refused", "ready"]


class AdapterError(StateError):
    """An adapter cannot be made or changed; the text says what to do."""


class AdapterTaken(AdapterError):
    """The account has an adapter of this name."""


@dataclass(slots=True, frozen=True)
class Adapter:
    """``id``: a UUID. ``version``: of what is served, from 1 on; 0: nothing yet. ``digest``: of its content
    (:func:`content_digest`), "" as long as there is none; ``rank``: the largest of its modules; ``size``: bytes of both
    files. Times: unix seconds.

    The other fields are of the version that is being uploaded. ``opened``: there is one. ``config``: its
    configuration, as it came; ``weights``: the blob of its weights, where they came first. ``problem``: why the files
    that came last were refused.
    """

    id: str
    account: str
    model: str
    name: str
    created: float
    modified: float
    description: str = ""
    public: bool = False
    version: int = 0
    digest: str = ""
    rank: int = 0
    size: int = 0
    opened: bool = True
    config: str = ""
    weights: str = ""
    problem: str = ""

    @property
    def status(self) -> Status:
        """Of what is served."""
        if self.digest:
            return "ready"
        return "refused" if self.problem else "waiting"

    @property
    def missing(self) -> tuple[str, ...]:
        """Files that the version that is being uploaded still lacks."""
        if not self.opened:
            return ()
        return tuple(name for name, there in ((CONFIG, self.config), (WEIGHTS, self.weights)) if not there)


def blob(digest: str, file: str) -> str:
    """Where a file of an adapter lies. ``file``: :data:`CONFIG` or :data:`WEIGHTS`."""
    return f"adapters/{digest}/{file}"


def content_digest(config: bytes, weights_size: int) -> hashlib._Hash:
    """SHA-256 over both files, each behind its length in eight bytes; to be fed with the weights. Its hex names the
    content: equal adapters of whomever are one to workers and caches.
    """
    digest = hashlib.sha256(len(config).to_bytes(8, "little"))
    digest.update(config)
    digest.update(weights_size.to_bytes(8, "little"))
    return digest


def digest_of(config: bytes, weights: bytes) -> str:
    """What names the content of both files."""
    digest = content_digest(config, len(weights))
    digest.update(weights)
    return digest.hexdigest()


class AdapterStore(Protocol):
    """All calls block and raise `Away`. Every change of what is served bumps the revision :attr:`NAME`."""

    NAME: str

    def create(self, adapter: Adapter, most: int) -> None:
        """On disk when this returns. Raises :class:`AdapterTaken`, and :class:`AdapterError` where the account has
        ``most`` already.
        """

    def find(self, account: str, which: str) -> Adapter | None:
        """By id or name: the account's own, or a public one that can be used (the oldest of that name)."""

    def own(self, account: str) -> list[Adapter]:
        """The account's, the oldest first."""

    def public(self, limit: int, offset: int = 0, order: Order = "created") -> list[Adapter]:
        """Those of all accounts that all may use."""

    def change(self, account: str, adapter_id: str, **fields: object) -> Adapter | None:
        """``fields`` of :class:`Adapter`; None where it is not there (any more)."""

    def serve(self, adapter: Adapter) -> bool:
        """Puts a checked version in the place of the one before: ``version``, ``digest``, ``rank``, ``size`` of
        ``adapter``. False where the adapter has been removed or changed meanwhile.
        """

    def remove(self, account: str, adapter_id: str, now: float) -> bool: ...

    def hold(self, digest: str, now: float) -> None:
        """Before blobs of ``digest`` are written: nobody deletes them within :data:`KEPT_S`."""

    def sweep(self, now: float, delete: Callable[[str], None]) -> None:
        """Calls ``delete(digest)`` for what no adapter has had for :data:`KEPT_S`."""
