"""Routes of queues, on the paths of Cloudflare Queues' HTTP API, so that its SDK's `queues` works."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import AlreadyThere, InvalidInput, MissingBody, NoSuchObject, OutOfCapacity
from serve_app.api.queues import read, write
from serve_app.api.schema import accounts as shared
from serve_app.api.schema import queues as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import TaskRequest
from serve_app.gateway.http.exchange import ACCOUNT, RUN, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.idempotent import HEADER
from serve_app.state.deferred.queues import Backlog, Consumer, New, Queue, QueueError
from serve_app.state.reader import plausible

_TAG = "Queues"


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = QueueRoutes(exchange)
    top = ACCOUNT + "/queues"
    one = top + "/{queue}"
    messages, consumers = one + "/messages", one + "/consumers"
    consumer = consumers + "/{consumer}"
    answer, listing, named = shared.object_answer(), shared.list_answer(), {"queue_name": "asks"}
    settings, bound = schemas.queue_input(), schemas.consumer_input()

    def about(summary: str, body: dict[str, Any] | None = None, example: Any = None) -> Operation:
        return Operation(summary, _TAG, answer, body, example)

    listed: list[tuple[str, str, Any, Operation]] = [
        ("GET", top, routes.list, Operation("Queues of an account", _TAG, listing)),
        ("POST", top, routes.create, about("A new queue", schemas.new_queue_input(), named)),
        ("GET", one, routes.get, about("One queue")),
        ("PUT", one, routes.update, about("Set a queue's name and settings", settings, named)),
        ("PATCH", one, routes.edit, about("Change a queue's name or settings", settings, named)),
        ("DELETE", one, routes.delete, about("End a queue with all its messages")),
        ("GET", one + "/metrics", routes.metrics, about("Messages that are not acknowledged")),
        ("POST", messages, routes.push, about("Push a message", schemas.message_input(), schemas.MESSAGE)),
        ("POST", messages + "/batch", routes.push_all,
         about("Push up to 100 messages", schemas.messages_input(), {"messages": [schemas.MESSAGE]})),
        ("POST", messages + "/pull", routes.pull,
         about("Pull messages, each under a lease", schemas.pull_input(), {"batch_size": 10})),
        ("POST", messages + "/ack", routes.ack,
         about("Acknowledge messages, or have them come again", schemas.ack_input(), {"acks": [{"lease_id": "a.b"}]})),
        ("POST", messages + "/peek", routes.peek,
         about("Look at messages without a lease", schemas.pull_input(), {"batch_size": 10})),
        ("POST", messages + "/purge", routes.purge_some,
         about("Drop single messages", schemas.refs_input(), {"refs": [{"ref": "0" * 32}]})),
        ("POST", one + "/purge", routes.purge,
         about("Drop all messages", schemas.purge_input(), {"delete_messages_permanently": True})),
        ("GET", one + "/purge", routes.purged, about("When all messages were dropped last")),
        ("GET", consumers, routes.consumers, Operation("What takes a queue's messages", _TAG, listing)),
        ("POST", consumers, routes.create_consumer, about("Bind a queue to a model, or set how it is pulled",
                                                          bound, schemas.CONSUMER)),
        ("GET", consumer, routes.consumer, about("One consumer")),
        ("PUT", consumer, routes.update_consumer, about("Change a consumer", bound, schemas.CONSUMER)),
        ("DELETE", consumer, routes.delete_consumer, about("Take a consumer away")),
    ]  # fmt: skip
    return [Endpoint(*each, scopes=USE if each[0] == "GET" else RUN) for each in listed]


class QueueRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gateway = exchange.gateway
        # Queues that were full when they were counted last.
        self._full: set[str] = set()

    # -- queues

    async def list(self, request: Request) -> Response:
        found = await self._look(self._store.all, request.state.account)
        return json_answer(success([write.queue(each) for each in found]))

    async def create(self, request: Request) -> Response:
        body = await self._body(request)
        name = read.queue_name(body)
        if not name:
            raise InvalidInput("queue_name is missing.", param="queue_name")
        made = await self._look(self._store.create, request.state.account, name, time.time())
        if fields := read.settings(body, whole=False):
            made = await self._changed(made, **fields)
        return json_answer(success(write.queue(made)))

    async def get(self, request: Request) -> Response:
        return json_answer(success(write.queue(await self._queue(request))))

    async def update(self, request: Request) -> Response:
        return await self._change(request, whole=True)

    async def edit(self, request: Request) -> Response:
        return await self._change(request, whole=False)

    async def delete(self, request: Request) -> Response:
        queue = await self._queue(request)
        await self._look(self._store.remove, queue.account, queue.id)
        return json_answer(success({}))

    async def metrics(self, request: Request) -> Response:
        queue = await self._queue(request)
        return json_answer(success(write.metrics(await self._backlog(queue))))

    # -- messages

    async def push(self, request: Request) -> Response:
        return await self._push(request, [read.pushed(await self._body(request))])

    async def push_all(self, request: Request) -> Response:
        return await self._push(request, read.pushed_together(await self._body(request)))

    async def pull(self, request: Request) -> Response:
        queue, (limit, lease_s) = await self._queue(request), read.pulled(await self._body(request))
        known = queue.consumer or Consumer("", "http_pull", 0.0)
        if known.model:
            raise InvalidInput(
                f"The messages of {queue.name} are run by {known.model}. Pull answers from {known.results}."
            )
        lease_s = known.lease_s if lease_s is None else lease_s
        found = await self._look(self._store.pull, queue, limit or known.batch, lease_s, time.time())
        return json_answer(success(write.pulled(found, await self._backlog(queue))))

    async def ack(self, request: Request) -> Response:
        queue, (acks, retries) = await self._queue(request), read.settled(await self._body(request))
        done = await self._look(self._store.settle, queue, acks, retries, time.time())
        return json_answer(success(write.acknowledged(done)))

    async def peek(self, request: Request) -> Response:
        queue, (limit, _) = await self._queue(request), read.pulled(await self._body(request))
        return json_answer(success(write.peeked(await self._look(self._store.peek, queue, limit or 5, time.time()))))

    async def purge_some(self, request: Request) -> Response:
        queue, refs = await self._queue(request), read.references(await self._body(request))
        await self._look(self._store.purge, queue, time.time(), refs)
        return json_answer(success({"errors": [], "warnings": {}}))

    async def purge(self, request: Request) -> Response:
        queue = await self._queue(request)
        if (await self._body(request)).get("delete_messages_permanently") is not True:
            raise InvalidInput("Send delete_messages_permanently: true.", param="delete_messages_permanently")
        await self._look(self._store.purge, queue, time.time())
        return json_answer(success(write.queue(queue)))

    async def purged(self, request: Request) -> Response:
        at = (await self._queue(request)).purged
        return json_answer(success({"completed": "true", "started_at": "" if at is None else write.iso(at)}))

    # -- consumers

    async def consumers(self, request: Request) -> Response:
        queue = await self._queue(request)
        return json_answer(success([] if queue.consumer is None else [write.consumer(queue.consumer, queue.name)]))

    async def consumer(self, request: Request) -> Response:
        queue, found = await self._consumer(request)
        return json_answer(success(write.consumer(found, queue.name)))

    async def create_consumer(self, request: Request) -> Response:
        queue = await self._queue(request)
        fields = self._fields(await self._body(request))
        if queue.consumer is not None:
            raise AlreadyThere(f"The queue {queue.name} has a consumer, {queue.consumer.id}. Change it, or remove it.")
        return await self._set(queue, Consumer(secrets.token_hex(16), created=time.time(), **fields))

    async def update_consumer(self, request: Request) -> Response:
        queue, found = await self._consumer(request)
        fields = self._fields(await self._body(request))
        return await self._set(queue, Consumer(found.id, created=found.created, **fields))

    async def delete_consumer(self, request: Request) -> Response:
        queue, _ = await self._consumer(request)
        await self._changed(queue, consumer=None)
        return json_answer(success({}))

    # -- what they share

    @property
    def _store(self) -> Any:
        return self._gateway.state.queues

    async def _look(self, look: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._gateway.state.look(look, *args, **kwargs)
        except QueueError as error:
            raise AlreadyThere(str(error)) from None

    async def _body(self, request: Request) -> dict[str, Any]:
        """Clients that want nothing in particular send nothing."""
        try:
            return await self._exchange.body(request, TaskRequest)
        except MissingBody:
            return {}

    async def _queue(self, request: Request) -> Queue:
        wanted, account = request.path_params["queue"], request.state.account
        found = await self._look(self._store.find, account, wanted) if plausible(wanted) else None
        if found is None:
            raise NoSuchObject(f"There is no queue {wanted[:64]!r} here. GET .../queues lists them.")
        return found

    async def _consumer(self, request: Request) -> tuple[Queue, Consumer]:
        queue, wanted = await self._queue(request), request.path_params["consumer"]
        if queue.consumer is None or queue.consumer.id != wanted:
            raise NoSuchObject(f"The queue {queue.name} has no consumer {wanted[:64]!r}.")
        return queue, queue.consumer

    def _fields(self, body: dict[str, Any]) -> dict[str, Any]:
        found = read.consumer(body)
        if "model" in found:
            found["model"] = self._gateway.models.find(found["model"]).id
        return found

    async def _change(self, request: Request, *, whole: bool) -> Response:
        queue, body = await self._queue(request), await self._body(request)
        fields, name = read.settings(body, whole=whole), read.queue_name(body)
        return json_answer(success(write.queue(await self._changed(queue, **fields, name=name or queue.name))))

    async def _changed(self, queue: Queue, **fields: Any) -> Queue:
        changed = await self._look(self._store.change, queue.account, queue.id, time.time(), **fields)
        if changed is None:
            raise NoSuchObject(f"There is no queue {queue.id} any more.")
        return changed

    async def _set(self, queue: Queue, consumer: Consumer) -> Response:
        await self._changed(queue, consumer=consumer)
        return json_answer(success(write.consumer(consumer, queue.name)))

    async def _push(self, request: Request, told: Sequence[read.Pushed]) -> Response:
        queue, key = await self._queue(request), request.headers.get(HEADER)
        if queue.consumer is not None and queue.consumer.model:
            for place, (body, kind, _) in enumerate(told):
                if kind != "json" or not isinstance(orjson.loads(body), dict):
                    raise InvalidInput(f"Message {place} is no JSON object, which {queue.consumer.model} needs.")
        new = []
        for place, (body, kind, delay_s) in enumerate(told):
            # Sent twice with the same key, it is there once, whatever became of the first answer.
            name = hashlib.sha256(f"{queue.id}\0{key}\0{place}".encode()).hexdigest()[:32] if key else None
            new.append(New(name or secrets.token_hex(16), body, kind, delay_s))  # type: ignore[arg-type]
        if queue.id in self._full and (await self._backlog(queue)).full:
            raise OutOfCapacity(f"The queue {queue.name} is full. Pull and acknowledge messages.", retry_after=60.0)
        await self._look(self._store.push, queue, new, request.state.caller, time.time())
        if queue.consumer is not None and queue.consumer.model:
            self._gateway.runners.wake()
        return json_answer(success({"metadata": {"metrics": write.metrics(await self._backlog(queue))}}))

    async def _backlog(self, queue: Queue) -> Backlog:
        found: Backlog = await self._look(self._store.backlog, queue.id)
        (self._full.add if found.full else self._full.discard)(queue.id)
        return found
