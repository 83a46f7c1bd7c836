"""Which pages of other origins may call the API from a browser."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.errors import InvalidInput
from serve_app.api.retry_after import HEADER
from serve_app.gateway.http.exchange import ErrorBody, error_answer

EXPOSED = ("cf-ray", "request-id", "x-request-id", "traceresponse", HEADER.lower(), "ratelimit", "ratelimit-policy")
METHODS = ("GET", "POST", "PUT", "DELETE")
HOUR_S = 3600


def cross_origin(origins: tuple[str, ...], dialect: Callable[[str], ErrorBody]) -> list[Middleware]:
    """Lets pages from ``origins`` ("*": all) call; keys come in headers, never in cookies. ``dialect`` gives the words
    for errors on a path.
    """
    if not origins:
        return []
    return [
        Middleware(
            _CrossOrigin,
            dialect=dialect,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED,
            max_age=HOUR_S,
        )
    ]


class _CrossOrigin(CORSMiddleware):
    """Refuses like everything else that refuses: as JSON with a code."""

    def __init__(self, *args: object, dialect: Callable[[str], ErrorBody], **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._dialect = dialect

    def preflight_response(self, request_headers: Headers) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code == 200:
            return found
        origin, method = request_headers["origin"], request_headers["access-control-request-method"]
        error = InvalidInput(
            f"Pages from {origin[:120]} may not send {method[:16]} here. SERVE_APP_CORS_ORIGINS names the origins that "
            f"may call this server, with {', '.join(METHODS)}."
        )
        return _Refused(error, found, self._dialect)


class _Refused(Response):
    """``error`` in the words of the path that it is sent to, with the headers of ``found``."""

    def __init__(self, error: InvalidInput, found: Response, dialect: Callable[[str], ErrorBody]) -> None:
        super().__init__()
        self._error = error
        self._found = found
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = error_answer(self._error, self._dialect(scope["path"]))
        for name, value in self._found.headers.items():
            if name not in ("content-length", "content-type"):
                answer.headers[name] = value
        await answer(scope, receive, send)
