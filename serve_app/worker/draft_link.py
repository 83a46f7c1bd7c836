"""A decode worker's way to a draft worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from serve_app.wire.draft import Proposals, ProposeCall, Query

if TYPE_CHECKING:
    from serve_app.engine.speculation.draft_proposer import DraftQuery

Ask = Callable[[ProposeCall], Proposals]


class DraftLink:
    """Asks a draft worker from the engine's thread. While it can't be reached, there are simply no drafts."""

    def __init__(self) -> None:
        self._ask: Ask | None = None

    @property
    def connected(self) -> bool:
        return self._ask is not None

    def connect(self, ask: Ask) -> None:
        """``ask(call)`` raises where the draft worker does not answer in time; then it is not asked any more."""
        self._ask = ask

    def __call__(self, queries: Sequence[DraftQuery], count: int, over: list[str]) -> dict[str, list[int] | None]:
        """Raises what asking raised."""
        ask = self._ask
        if ask is None:
            raise ConnectionError("no draft worker is connected")
        try:
            call = ProposeCall(tuple(Query(q.id, q.agreed, q.suffix, q.adapter) for q in queries), count, tuple(over))
            return ask(call).drafts
        except Exception:
            self._ask = None
            raise
