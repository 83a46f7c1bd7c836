"""Batches of a running server: what `serve-app batch` and `AI().batch` share.

::

    batch = AI().batch("@cf/pico/pico-instruct", [{"prompt": "One"}, {"prompt": "Two"}])
    for answer in batch:                 # as they finish
        print(answer["id"], answer["result"]["response"])
    batch.results()                      # all, in the order of the requests
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from serve_app.client.server import Server, ServerError

ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
# How often a batch is asked after: at first, and when nothing has changed for long.
POLL_S, MAX_POLL_S = 0.2, 2.0


class Batches:
    """The batches of one key's account."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.account = server.account
        self._top = f"{server.ai}/batches"

    @classmethod
    def connect(cls, home: Path | None = None) -> Self:
        """As :meth:`Server.connect`."""
        return cls(Server.connect(home))

    def submit(self, model: str, requests: Iterable[Mapping[str, Any]], *, key: str = "") -> dict[str, Any]:
        """Native requests of one model, sent as they come. ``key``: one key makes one batch."""
        lines = (json.dumps(dict(each), separators=(",", ":")).encode() + b"\n" for each in requests)
        return self.submit_lines(model, lines, key=key)

    def submit_lines(self, model: str, lines: Iterable[bytes], *, key: str = "") -> dict[str, Any]:
        """The same as JSON lines."""
        headers = {"Content-Type": "application/jsonl"} | ({"Idempotency-Key": key} if key else {})
        return self._server.result("POST", self._top, params={"model": model}, content=iter(lines), headers=headers)

    def submit_file(self, path: Path, endpoint: str, *, key: str = "") -> dict[str, Any]:
        """A file in OpenAI's form, whose requests are for ``endpoint``."""
        headers = {"Idempotency-Key": key} if key else {}
        with path.open("rb") as file:
            sent = self._server.ask(
                "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (path.name, file)}, headers=headers
            )
        asked = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
        made = self._server.ask("POST", "/v1/batches", json=asked, headers=headers)
        return self.get(made["id"])

    def get(self, batch_id: str) -> dict[str, Any]:
        return self._server.result("GET", f"{self._top}/{batch_id}")

    def page(self, *, after: str = "", limit: int = 20) -> tuple[list[dict[str, Any]], bool]:
        """The newest first; whether there are more."""
        found = self._server.ask("GET", self._top, params={"limit": limit} | ({"after": after} if after else {}))
        return found["result"], bool(found["result_info"]["has_more"])

    def cancel(self, batch_id: str) -> dict[str, Any]:
        return self._server.result("POST", f"{self._top}/{batch_id}/cancel")

    def retry(self, batch_id: str) -> dict[str, Any]:
        """A new batch of what did not succeed."""
        return self._server.result("POST", f"{self._top}/{batch_id}/retry")

    def delete(self, batch_id: str) -> dict[str, Any]:
        return self._server.result("DELETE", f"{self._top}/{batch_id}")

    def lines(self, batch_id: str, *, errors: bool = False) -> Iterator[str]:
        """Results so far as JSON lines, in the order of the requests. ``errors``: what failed, where that is apart."""
        path, params = f"{self._top}/{batch_id}/results", {"errors": "true"} if errors else {}
        with self._server.stream("GET", path, params=params) as answer:
            yield from (line for line in answer.iter_lines() if line)

    def wait(self, batch_id: str, told: Callable[[dict[str, Any]], None] = lambda batch: None) -> dict[str, Any]:
        """The batch when it has ended. ``told``: hears how far it is, again and again."""
        pause, before = POLL_S, -1
        while True:
            batch = self.get(batch_id)
            told(batch)
            if batch["status"] in ENDED:
                return batch
            done = batch["progress"]["done"]
            pause = POLL_S if done != before else min(pause * 1.5, MAX_POLL_S)
            before = done
            time.sleep(pause)

    def estimate(self, lines: Sequence[bytes], model: str, endpoint: str = "") -> dict[str, Any]:
        """What a batch of these JSON lines would use and cost, which is not made: native requests of a model, or
        OpenAI's for ``endpoint``, up to 1 MB.
        """
        if not endpoint:
            path = f"{self._server.ai}/estimate/{model}"
            headers = {"Content-Type": "application/json"}
            return self._server.result(
                "POST", path, content=b'{"requests":[' + b",".join(lines) + b"]}", headers=headers
            )
        form = {"data": {"purpose": "batch"}, "files": {"file": ("estimate.jsonl", b"\n".join(lines))}}
        sent = self._server.ask("POST", "/v1/files", **form)
        try:
            asked = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
            return self._server.ask("POST", "/v1/batches", json=asked, headers={"x-estimate": "true"})
        finally:
            self._server.ask("DELETE", f"/v1/files/{sent['id']}")

    def close(self) -> None:
        self._server.close()


class BatchHandle:
    """One batch. Iterating gives its answers as they finish: ``{"id": place, "success", "result" or "errors",
    "external_reference"}``.
    """

    def __init__(self, batches: Batches, batch_id: str) -> None:
        self._batches = batches
        self.id = batch_id

    def status(self) -> dict[str, Any]:
        """How far it is: ``status``, ``requests`` by how they ended, ``progress``, ``neurons``, ``cost``."""
        return self._batches.get(self.id)

    def results(self) -> list[dict[str, Any]]:
        """All answers in the order of the requests, when the batch has ended."""
        self._ended(self._batches.wait(self.id))
        return [json.loads(line) for line in self._batches.lines(self.id)]

    def cancel(self) -> dict[str, Any]:
        """What is done by then stays."""
        return self._batches.cancel(self.id)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        seen: set[int] = set()
        pause = POLL_S
        while True:
            batch = self.status()
            over = batch["status"] in ENDED
            # All that is done comes each time: so not before there is a tenth more of it.
            if over or batch["progress"]["done"] >= len(seen) * 1.1 + 1 or pause >= MAX_POLL_S:
                pause = POLL_S
                for line in self._batches.lines(self.id):
                    answer = json.loads(line)
                    if answer["id"] not in seen:
                        seen.add(answer["id"])
                        yield answer
            if over:
                self._ended(batch)
                return
            time.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_S)

    @staticmethod
    def _ended(batch: Mapping[str, Any]) -> None:
        if batch["status"] == "failed":
            problems = "; ".join(str(each.get("message", each)) for each in batch["problems"][:5])
            raise ServerError(f"the batch was refused: {problems}", 400)


class AsyncBatchHandle:
    """The same for event loops."""

    def __init__(self, handle: BatchHandle) -> None:
        self._handle = handle
        self.id = handle.id

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._handle.status)

    async def results(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._handle.results)

    async def cancel(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._handle.cancel)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        answers = iter(self._handle)
        while (answer := await asyncio.to_thread(next, answers, None)) is not None:
            yield answer
