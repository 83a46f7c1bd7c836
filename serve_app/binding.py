"""The Python handle: ``AI().run(model, inputs)`` from any driver attached to the cluster, as in a Worker.

::

    from serve_app import AI

    ai = AI()
    ai.run("@cf/pico/pico-instruct", {"prompt": "What does itertools.chain do?"})["response"]
    for event in ai.run("@cf/pico/pico-instruct", {"prompt": "Hello", "stream": True}):
        print(event.get("response", ""), end="")

``AsyncAI`` is its twin for event loops. Results are the ``result`` of ``POST /ai/run/{model}``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from serve_app.config import DEFAULT_HOME


class AIError(RuntimeError):
    """The model or the gateway refused the call. ``code`` is the documented number, ``status`` the HTTP status."""

    def __init__(self, envelope: dict[str, Any]) -> None:
        first = envelope["errors"][0]
        super().__init__(first["message"])
        self.code: int = first["code"]
        self.status: int = envelope["status"]


class _Bound:
    def __init__(self, home: str | os.PathLike[str] | None = None) -> None:
        """Attaches to the cluster that ``serve-app serve`` started with the same home, or to ``RAY_ADDRESS``.

        A process that has called ``ray.init`` already stays as it is.
        """
        from serve_app.cluster import attach

        attach(Path(home or os.environ.get("SERVE_APP_HOME") or DEFAULT_HOME).expanduser())
        from ray import serve

        self._handle = serve.get_app_handle("gateway")

    @staticmethod
    def _result(envelope: dict[str, Any]) -> dict[str, Any]:
        if not envelope.get("success", True):
            raise AIError(envelope)
        return envelope["result"]

    @staticmethod
    def _frame(frame: dict[str, Any]) -> dict[str, Any]:
        if frame.get("success") is False:
            raise AIError(frame)
        return frame


class AI(_Bound):
    """Calls models and waits for the answer."""

    def run(self, model: str, inputs: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
        """The result as a dict, or with ``inputs["stream"]`` an iterator of the stream's events.

        ``options`` are those of the API's ``options`` object, e.g. ``{"rejectIfBusy": True}``. Raises :class:`AIError`.
        """
        inputs = _with_options(inputs, options)
        if inputs.get("stream"):
            return self._stream(model, inputs)
        return self._result(self._handle.run.remote(model, inputs).result())

    def _stream(self, model: str, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for frame in self._handle.options(stream=True).run_stream.remote(model, inputs):
            yield self._frame(frame)


class AsyncAI(_Bound):
    """The same for event loops: ``await ai.run(...)``, and ``async for`` over ``ai.stream(...)``."""

    async def run(self, model: str, inputs: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
        """The result as a dict. Raises :class:`AIError`."""
        return self._result(await self._handle.run.remote(model, {**_with_options(inputs, options), "stream": False}))

    async def stream(
        self, model: str, inputs: dict[str, Any], options: dict[str, Any] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The stream's events."""
        handle = self._handle.options(stream=True)
        async for frame in handle.run_stream.remote(model, {**_with_options(inputs, options), "stream": True}):
            yield self._frame(frame)


def _with_options(inputs: dict[str, Any], options: dict[str, Any] | None) -> dict[str, Any]:
    return {**inputs, "options": options} if options else dict(inputs)
