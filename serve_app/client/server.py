"""A running server as the command line sees it: where it is, the key, and its errors as one type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 120.0


class ServerError(RuntimeError):
    """The server refused, and why, or there is none. ``status``: of HTTP, 503 where nobody answers."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server under one key. ``http``: a client whose base URL is the server's, and that sends the key. ``account``:
    whose it is.
    """

    def __init__(self, http: httpx.Client, account: str) -> None:
        self.http = http
        self.account = account

    @classmethod
    def connect(cls, home: Path | None = None) -> Self:
        """The server that `serve-app serve` started with this state directory, or the one of the settings' port, with
        the key and account of the settings. Asks nobody yet.
        """
        import httpx

        from serve_app.cluster import NotRunning, read_attachment
        from serve_app.config import api_key, load_settings

        settings = load_settings(home=home)
        try:
            url = read_attachment(settings.home).url
        except NotRunning:
            url = f"http://127.0.0.1:{settings.port}"
        headers = {"Authorization": f"Bearer {api_key(settings)}"}
        return cls(httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S), settings.account_id)

    @property
    def ai(self) -> str:
        """The path of the account's native API."""
        return f"/client/v4/accounts/{self.account}/ai"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """The answer's JSON. ``more``: as httpx takes it. Raises :class:`ServerError`."""
        with self._reached():
            answer = self.http.request(method, path, **more)
        if answer.is_error:
            raise refusal(answer)
        return answer.json()

    def result(self, method: str, path: str, **more: Any) -> Any:
        """What is in the native envelope."""
        return self.ask(method, path, **more)["result"]

    @contextmanager
    def stream(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        """An answer that is read as it comes. Leaving the block ends the request."""
        with self._reached(), self.http.stream(method, path, **more) as answer:
            if answer.is_error:
                answer.read()
                raise refusal(answer)
            yield answer

    @contextmanager
    def _reached(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError:
            raise ServerError(
                f"no server answers at {self.http.base_url}: start one with `make serve`, or name the state directory "
                "of the one that runs with SERVE_APP_HOME, or its port with SERVE_APP_PORT",
                503,
            ) from None
        except httpx.TransportError as error:
            raise ServerError(
                f"the server at {self.http.base_url} was lost: {error or type(error).__name__}", 503
            ) from None


def refusal(answer: httpx.Response) -> ServerError:
    """An answer that is an error, in whatever dialect, with what to do about keys."""
    try:
        body = answer.json()
        first = (body.get("errors") or [body.get("error")])[0]
        said = str(first["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        said = f"the server answered with {answer.status_code}"
    if answer.status_code == 401:
        said = (
            f"the server takes no such key ({said.rstrip('.')}): set SERVE_APP_API_KEY to one of its keys, or "
            "SERVE_APP_HOME to its state directory"
        )
    return ServerError(said, answer.status_code)
