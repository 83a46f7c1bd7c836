"""Several gateways' states on one store, which the test can take away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.state import State
from tests.waiting import until

OWN = "the-key-of-the-settings-0123456789"


class Gateways:
    def __init__(self, database: str, root: Path) -> None:
        self._database = database
        self._root = root
        self._lost = False
        # Limits of a minute: whenever a test begins, its minute has just begun.
        self._late_s = time.time() % 60
        self.made: list[State] = []

    def make(self, home: str, **options: Any) -> State:
        """A gateway on the node whose state directory is ``home``."""
        state = State(self._root / home, "local", (hash_key(OWN),), database=self._database, **options)
        state.allowance._clock = state.allowance.leases._clock = lambda: time.time() - self._late_s
        event.listen(state._store.database.engine, "begin", self._refuse)
        self.made.append(state)
        return state

    def lose(self) -> None:
        """The database refuses every transaction from now on."""
        self._lost = True

    def find(self) -> None:
        self._lost = False

    def _refuse(self, _: Any) -> None:
        if self._lost:
            raise OperationalError("BEGIN", {}, Exception("the test took it away"))

    async def settled(self, *states: State) -> None:
        """Until nothing waits for the store, and no journal keeps what it has."""

        def done(state: State) -> bool:
            told = state.counters()
            return told["waiting"] == told["journal_bytes"] == 0 and state.health()["status"] == "ready"

        for state in states or self.made:
            await until(lambda state=state: done(state))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for state in self.made:
            state.close()


def who(caller: Caller | None) -> tuple[str, float, str] | None:
    """What the store says of the caller's account and key."""
    return None if caller is None else (caller.account, caller.weight, caller.priority)
