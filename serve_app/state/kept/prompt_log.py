"""Prompts and answers that are kept: of no account before an operator says so, and for as many days as he says."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from serve_app.api.errors import NotFound
from serve_app.state.callers.audit import Actor
from serve_app.state.protocols import Row
from serve_app.state.reader import ReadPool, plausible
from serve_app.state.writer import GroupWriter

# The rule of every account that has none of its own.
EVERYBODY = "*"
MOST_DAYS = 400.0
# Bytes that one account's take, as they are stored; the oldest go first.
MOST_BYTES = 256 << 20
KIND = "prompt"


@dataclass(slots=True, frozen=True)
class Prompt:
    """One that is kept. ``at``, ``until``: unix seconds. ``body``: JSON."""

    at: float
    until: float
    body: bytes

    def shown(self) -> dict[str, Any]:
        return {"time": self.at, "until": self.until, **orjson.loads(self.body)}


class PromptStore(Protocol):
    """All calls block and raise `Away`. A changed rule bumps the revision :attr:`NAME`."""

    NAME: str

    def rules(self) -> dict[str, float]:
        """Days by account, or :data:`EVERYBODY`."""

    def keep(self, account: str, days: float, by: Actor | None = None, *, told: str = "") -> None:
        """``told``: whose audit trail has it, the account's own by default."""

    def forget(self, account: str, by: Actor | None = None, *, told: str = "") -> int:
        """Nothing is kept any more, and what was is deleted, of everybody for :data:`EVERYBODY`. How much that was."""

    def find(self, account: str, request_id: str, now: float) -> Prompt | None: ...

    def delete(self, account: str, request_id: str, by: Actor | None = None) -> bool: ...

    def trim(self, now: float) -> None: ...


class PromptLog:
    """What one gateway knows. Another thread may :meth:`fill` it at any time."""

    def __init__(self, store: PromptStore, writer: GroupWriter, reader: ReadPool) -> None:
        self.store = store
        self._writer, self._reader = writer, reader
        self._rules: Mapping[str, float] = {}
        self._filling = threading.Lock()

    def fill(self) -> None:
        """Who reads later also fills later. Blocks; raises `Away`."""
        with self._filling:
            self._rules = self.store.rules()

    def days(self, account: str) -> float | None:
        """For how long those of the account are kept; None: not at all."""
        rules = self._rules
        return None if not rules else rules.get(account, rules.get(EVERYBODY))

    @property
    def of_everybody(self) -> float | None:
        return self._rules.get(EVERYBODY)

    def add(self, account: str, request_id: str, at: float, body: bytes) -> None:
        """Keeps one, unless a rule has ended meanwhile."""
        if (days := self.days(account)) is None or not request_id:
            return
        columns = {"account": account, "id": request_id, "at": at, "until": at + days * 86_400, "body": body}
        self._writer.add(Row(KIND, (account, request_id), columns, len(body)))

    async def delete(self, account: str, request_id: str, by: Actor | None = None) -> bool:
        """Whether there was one, on its way to the store or there. Raises `StoreAway`."""
        waited = self._writer.drop(KIND, (account, request_id))
        if not plausible(request_id):
            return False
        return await self._reader.run(self.store.delete, account, request_id, by) or waited

    async def get(self, account: str, request_id: str, now: float) -> dict[str, Any]:
        """Raises :class:`NotFound` and `StoreAway`."""
        waiting = self._writer.find(KIND, (account, request_id))
        if waiting is not None:
            return Prompt(waiting["at"], waiting["until"], waiting["body"]).shown()
        found = None
        if plausible(request_id):
            found = await self._reader.run(self.store.find, account, request_id, now)
        if found is None:
            raise NotFound("Prompt and answer of this request are not kept.", param="id")
        return found.shown()
