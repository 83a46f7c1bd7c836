"""Which workers a session holds on to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

from serve_app.routing.fleet import Worker


class Sessions:
    """The latest ``limit`` sessions and the workers that their last request went to."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()  # prefill and decode worker

    def went(self, session: str, prefill: str, decode: str) -> None:
        """The session's latest request has been sent there."""
        self._known[session] = (prefill, decode)
        self._known.move_to_end(session)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def held(self, session: str | None, workers: Mapping[str, Worker]) -> dict[str, str]:
        """The workers that a session holds on to, and for what. Every gateway starts a new session on the same ones."""
        if session is None:
            return {}
        known = self._known.get(session)
        if known is not None:
            prefill, decode = known
            return {prefill: "prefill decode"} if prefill == decode else {prefill: "prefill", decode: "decode"}
        held: dict[str, str] = {}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            fitting = [w.name for w in workers.values() if w.role != other]
            if fitting:
                name = max(fitting, key=lambda n: _rank(session, n))
                held[name] = f"{held.get(name, '')} {role}"
        return held


def _rank(session: str, worker: str) -> bytes:
    """Rendezvous hashing: every gateway ranks the workers alike, and a lost worker moves only its own sessions."""
    return blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest()
