"""The Python handle: ``AI().run(model, inputs)`` from any driver attached to the cluster, as in a Worker.

::

    from serve_app import AI

    ai = AI()
    ai.run("@cf/pico/pico-instruct", {"prompt": "What does itertools.chain do?"})["response"]
    for event in ai.run("@cf/pico/pico-instruct", {"prompt": "Hello", "stream": True}):
        print(event.get("response", ""), end="")

``AsyncAI`` is its twin for event loops. Results are the ``result`` of ``POST /ai/run/{model}``. With
``{"resumable": 60}`` in the options a call outlives its gateway: a stream goes on at another one where it was, event by
event, and a whole answer is asked for again; both are charged once.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.config import DEFAULT_HOME

if TYPE_CHECKING:
    from serve_app.client.batches import AsyncBatchHandle, BatchHandle

# Before a call is made again whose gateway was lost.
AGAIN_S = 0.3


class AIError(RuntimeError):
    """The model or the gateway refused the call. ``code`` is the documented number, ``status`` the HTTP status."""

    def __init__(self, envelope: dict[str, Any]) -> None:
        first = envelope["errors"][0]
        super().__init__(first["message"])
        self.code: int = first["code"]
        self.status: int = envelope.get("status", 500)


class _Bound:
    def __init__(self, home: str | os.PathLike[str] | None = None) -> None:
        """Attaches to the cluster that ``serve-app serve`` started with the same home, or to ``RAY_ADDRESS``.

        A process that has called ``ray.init`` already stays as it is.
        """
        from serve_app.cluster import attach

        self._home = Path(home or os.environ.get("SERVE_APP_HOME") or DEFAULT_HOME).expanduser()
        attach(self._home)
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

    def _submitted(self, model: str, requests: Iterable[Mapping[str, Any]], key: str) -> BatchHandle:
        from serve_app.client.batches import Batches, BatchHandle

        batches = Batches.connect(self._home)
        return BatchHandle(batches, batches.submit(model, requests, key=key)["id"])


class AI(_Bound):
    """Calls models and waits for the answer."""

    def batch(self, model: str, requests: Iterable[Mapping[str, Any]], *, key: str = "") -> BatchHandle:
        """Has requests run with what interactive users leave of the machine; they are sent as they come, so there may
        be many. The batch goes on when this process ends: `serve-app batch` shows it. ``key``: one key makes one batch,
        however often it is sent. Raises :class:`~serve_app.client.server.ServerError`.
        """
        return self._submitted(model, requests, key)

    def run(self, model: str, inputs: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
        """The result as a dict, or with ``inputs["stream"]`` an iterator of the stream's events.

        ``options`` are those of the API's ``options`` object, e.g. ``{"rejectIfBusy": True}``. Raises :class:`AIError`.
        """
        inputs = _with_options(inputs, options)
        if inputs.get("stream"):
            return self._stream(model, inputs)
        asked = _Asked(inputs)
        while True:
            try:
                return self._result(self._handle.run.remote(model, inputs, asked.id).result())
            except asked.losses as lost:
                time.sleep(asked.pause(lost))

    def _stream(self, model: str, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        asked = _Asked(inputs)
        handle = self._handle.options(stream=True)
        if not asked.patience_s:
            for frame in handle.run_stream.remote(model, inputs):
                yield self._frame(frame)
            return
        while True:
            try:
                for number, frame in handle.follow.remote(model, inputs, asked.id, asked.after):
                    asked.heard(number)
                    yield self._frame(frame)
                return
            except asked.losses as lost:
                time.sleep(asked.pause(lost))


class AsyncAI(_Bound):
    """The same for event loops: ``await ai.run(...)``, and ``async for`` over ``ai.stream(...)``."""

    async def batch(self, model: str, requests: Iterable[Mapping[str, Any]], *, key: str = "") -> AsyncBatchHandle:
        """See :meth:`AI.batch`."""
        from serve_app.client.batches import AsyncBatchHandle

        return AsyncBatchHandle(await asyncio.to_thread(self._submitted, model, requests, key))

    async def run(self, model: str, inputs: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
        """The result as a dict. Raises :class:`AIError`."""
        inputs = {**_with_options(inputs, options), "stream": False}
        asked = _Asked(inputs)
        while True:
            try:
                return self._result(await self._handle.run.remote(model, inputs, asked.id))
            except asked.losses as lost:
                await asyncio.sleep(asked.pause(lost))

    async def stream(
        self, model: str, inputs: dict[str, Any], options: dict[str, Any] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The stream's events."""
        inputs = {**_with_options(inputs, options), "stream": True}
        asked = _Asked(inputs)
        handle = self._handle.options(stream=True)
        if not asked.patience_s:
            async for frame in handle.run_stream.remote(model, inputs):
                yield self._frame(frame)
            return
        while True:
            try:
                async for number, frame in handle.follow.remote(model, inputs, asked.id, asked.after):
                    asked.heard(number)
                    yield self._frame(frame)
                return
            except asked.losses as lost:
                await asyncio.sleep(asked.pause(lost))


class _Asked:
    """One call, which is made again under the same ``id`` if its gateway is lost, for as long as it asked to be
    resumable (``patience_s``). ``after``: the last event that was heard.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        from ray.exceptions import RayActorError

        options = inputs.get("options")
        wanted = options.get("resumable") if isinstance(options, dict) else None
        # What else it may be is for the gateway to refuse.
        self.patience_s = float(wanted) if isinstance(wanted, int | float) else 0.0
        self.losses = RayActorError
        self.id = secrets.token_hex(16)
        self.after = 0
        self._again = True
        self._heard = time.monotonic()

    def heard(self, number: int) -> None:
        """``number`` 0: the event is of a stream that cannot be resumed."""
        self.after = number
        self._again = number > 0
        self._heard = time.monotonic()

    def pause(self, lost: Exception) -> float:
        """Seconds until the call is made again. Raises ``lost`` where it is not."""
        if not self._again or time.monotonic() - self._heard > self.patience_s:
            raise lost
        return AGAIN_S


def _with_options(inputs: dict[str, Any], options: dict[str, Any] | None) -> dict[str, Any]:
    return {**inputs, "options": options} if options else dict(inputs)
