"""What an operator has said of models by hand, as one gateway knows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Protocol

from serve_app.catalog.operated import Operated, Share
from serve_app.state.callers.audit import Actor


class OperatedStore(Protocol):
    """All calls block and raise `Away`. A change bumps the revision :attr:`NAME`."""

    NAME: str

    def all(self) -> dict[str, Operated]:
        """By model."""

    def put(self, account: str, found: Operated, by: Actor | None = None) -> None:
        """What holds of the model from now on. ``account``: whose audit trail tells of it."""

    def forget(self, account: str, model: str, by: Actor | None = None) -> None: ...


def of_row(model: str, record: str, running: bool | None, bounds: str, canary: str | None = None) -> Operated:
    """As a row of the store has it; ``bounds``, ``canary``: JSON."""
    replicas = {stage: (least, most) for stage, (least, most) in json.loads(bounds).items()}
    share = None if canary is None else Share(**json.loads(canary))
    return Operated(model, record, None if running is None else bool(running), replicas, share)


class OperatedBook:
    """Another thread may :meth:`fill` it at any time. ``version`` grows with each filling."""

    def __init__(self, store: OperatedStore) -> None:
        self.store = store
        self.known: Mapping[str, Operated] = {}
        self.version = 0
        self._filling = threading.Lock()

    def fill(self) -> None:
        """Who reads later also fills later. Blocks; raises `Away`."""
        with self._filling:
            self.known = self.store.all()
            self.version += 1
