"""Which workers a session holds on to."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import blake2b

from serve_app.routing.fleet import Worker
from serve_app.routing.shortlist import PRICE_ALL

# Of each worker on the circle: the more, the evener.
PLACES = 8


class Sessions:
    """The latest ``limit`` sessions and the workers that their last request went to."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()  # prefill and decode worker
        self._circle: list[tuple[bytes, str]] = []
        self._version = -1

    def went(self, session: str, prefill: str, decode: str) -> None:
        """The session's latest request has been sent there."""
        self._known[session] = (prefill, decode)
        self._known.move_to_end(session)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def held(self, session: str | None, workers: Mapping[str, Worker], version: int) -> dict[str, str]:
        """The workers that a session holds on to, and for what. Every gateway starts a new session on the same ones.
        ``version``: of the fleet, which is another one when a worker has come or gone.
        """
        if session is None:
            return {}
        known = self._known.get(session)
        if known is not None:
            prefill, decode = known
            return {prefill: "prefill decode"} if prefill == decode else {prefill: "prefill", decode: "decode"}
        held: dict[str, str] = {}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if len(workers) <= PRICE_ALL:
                fitting = (name for name, worker in workers.items() if worker.role != other)
                name = max(fitting, key=lambda n: _rank(session, n), default=None)
            else:
                around = self._around(session, workers, version)
                name = next((name for name in around if workers[name].role != other), None)
            if name is not None:
                held[name] = f"{held.get(name, '')} {role}"
        return held

    def _around(self, session: str, workers: Mapping[str, Worker], version: int) -> Iterator[str]:
        """The workers of a large fleet from the session's place on a circle on, where each has several places."""
        if self._version != version:
            self._version = version
            self._circle = sorted((_rank(str(place), name), name) for name in workers for place in range(PLACES))
        at = bisect_left(self._circle, (_rank("", session), ""))
        return (self._circle[(at + i) % len(self._circle)][1] for i in range(len(self._circle)))


def _rank(session: str, worker: str) -> bytes:
    """Rendezvous hashing: every gateway ranks the workers alike, and a lost worker moves only its own sessions."""
    return blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest()
