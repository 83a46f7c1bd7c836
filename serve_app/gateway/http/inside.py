"""Requests that come from inside, without a connection: each is run by the handler of its route."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Message

from serve_app.api.errors import NoRoute
from serve_app.state.callers.accounts import Caller

T = TypeVar("T")
# Addresses that are remembered; most requests go to few.
_KNOWN = 256


class Inside(Generic[T]):
    """``routes``, each with what belongs to it."""

    def __init__(self, routes: Iterable[tuple[Route, T]]) -> None:
        self._routes = list(routes)
        self._known: dict[tuple[str, str], tuple[MutableMapping[str, Any], T]] = {}

    def post(
        self,
        path: str,
        body: bytes,
        caller: Caller,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        query: bytes = b"",
        root_path: str = "",
    ) -> tuple[Request, T]:
        """The request as a handler gets it, and what belongs to its route. Raises `NoRoute`."""
        child, found = self._find(path, root_path)
        scope = {"type": "http", "method": "POST", "path": path, "query_string": query, "root_path": root_path}
        scope["headers"] = [*headers, (b"content-length", b"%d" % len(body))]

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        request = Request({**scope, **child}, receive)
        request.state.caller, request.state.account = caller, caller.account
        request.state.whole_body = body
        return request, found

    def _find(self, path: str, root_path: str) -> tuple[MutableMapping[str, Any], T]:
        if (known := self._known.get((path, root_path))) is not None:
            return known
        scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path}
        for route, what in self._routes:
            match, child = route.matches(scope)
            if match == Match.FULL:
                if len(self._known) < _KNOWN:
                    self._known[(path, root_path)] = child, what
                # What the route found in the path belongs to this request alone.
                return child, what
        raise NoRoute("POST", path)
