"""One stream of the worker's end of the channel."""

from __future__ import annotations

from typing import Generic, TypeVar

from serve_app.wire.tokens import TokenItem

Connection = TypeVar("Connection")


class Outgoing(Generic[Connection]):
    """Items not acknowledged yet, in order; those before ``sent`` were written to the present connection."""

    __slots__ = ("connection", "end", "finished", "items", "paused", "sent", "stream_id")

    def __init__(self, stream_id: str, connection: Connection, start: int) -> None:
        self.stream_id = stream_id
        self.connection = connection
        self.items: list[TokenItem] = []
        self.sent = 0
        self.end = start
        self.finished = False
        self.paused = False

    def acknowledge(self, offset: int, finished: bool) -> None:
        keep = 0
        for item in self.items:
            if item.end > offset or (item.finish is not None and not finished):
                break
            keep += 1
        if keep:
            del self.items[:keep]
            self.sent = max(0, self.sent - keep)

    def resume(self, offset: int) -> None:
        """Sends again from ``offset``: what was on its way when the reader asked for a pause may have been
        dropped.
        """
        self.paused = False
        self.sent = 0
        while self.sent < len(self.items):
            item = self.items[self.sent]
            if item.end > offset or item.finish is not None:
                break
            self.sent += 1
