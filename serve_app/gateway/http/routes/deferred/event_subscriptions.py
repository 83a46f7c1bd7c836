"""Routes of subscriptions whose events come as messages of a queue, on Cloudflare's paths."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import BadChange, NoSuchObject
from serve_app.api.fields.values import boolean, string, texts
from serve_app.api.listing import paged
from serve_app.api.queues.write import iso
from serve_app.api.schema import accounts as shared
from serve_app.api.schema import queues as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.exchange import ACCOUNT, ADMIN, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.operating.accounts import Management
from serve_app.state.deferred.events import KINDS, EventsError, Subscription, check_kinds

_TAG = "Queues"
# What Cloudflare calls the events of a model by, and its source.
_SHORT, _SOURCE = "cf.workersAi.model.", "workersAi.model"
_PAGED = {name: {"type": "integer", "minimum": 1} for name in ("page", "per_page")}


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = EventRoutes(exchange)
    top = ACCOUNT + "/event_subscriptions/subscriptions"
    one, body, example = shared.object_answer(), schemas.subscription_input(), schemas.SUBSCRIPTION
    listed: list[tuple[str, str, Any, Operation]] = [
        ("GET", top, routes.list, Operation("Events that come into queues", _TAG, shared.list_answer(), query=_PAGED)),
        ("POST", top, routes.create, Operation("Have events come into a queue", _TAG, one, body, example)),
        ("GET", top + "/{subscription}", routes.get, Operation("One subscription", _TAG, one)),
        ("PATCH", top + "/{subscription}", routes.update, Operation("Change a subscription", _TAG, one, body, example)),
        ("DELETE", top + "/{subscription}", routes.delete, Operation("End a subscription", _TAG, one)),
    ]
    return [Endpoint(*each, scopes=ADMIN, operated=True) for each in listed]


class EventRoutes(Management):
    async def list(self, request: Request) -> Response:
        account = request.path_params["account"]
        found = await self.look(self.state.events.subscriptions, account)
        return json_answer(paged([_shown(each) for each in found if each.queue], request.query_params))

    async def get(self, request: Request) -> Response:
        return json_answer(success(_shown(await self._one(request))))

    async def create(self, request: Request) -> Response:
        account = (await self.account(request.path_params["account"])).name
        fields = await self._fields(await self.exchange.body(request), account)
        for name, field in (("destination", "queue"), ("events", "kinds")):
            if field not in fields:
                raise BadChange(f"{name} is missing.", param=name)
        try:
            made = await self.look(self.state.events.subscribe, account, time.time(), **fields, by=self.by(request))
        except EventsError as error:
            raise BadChange(str(error)) from None
        return json_answer(success(_shown(made)))

    async def update(self, request: Request) -> Response:
        known = await self._one(request)
        fields = await self._fields(await self.exchange.body(request), known.account)
        changed = await self.look(
            self.state.events.change, known.account, known.id, time.time(), **fields, by=self.by(request)
        )
        return json_answer(success(_shown(changed or known)))

    async def delete(self, request: Request) -> Response:
        known = await self._one(request)
        await self.look(self.state.events.unsubscribe, known.account, known.id, by=self.by(request))
        return json_answer(success(_shown(known)))

    async def _one(self, request: Request) -> Subscription:
        account, wanted = request.path_params["account"], request.path_params["subscription"]
        found = await self.look(self.state.events.subscriptions, account)
        one = next((each for each in found if each.id == wanted and each.queue), None)
        if one is None:
            raise NoSuchObject(f"Account {account[:64]} has no subscription {wanted[:64]!r}.")
        return one

    async def _fields(self, body: dict[str, Any], account: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if body.get("destination") is not None:
            found["queue"] = await self._destination(body["destination"], account)
        if isinstance(source := body.get("source"), dict):
            if source.get("type") not in (None, _SOURCE):
                raise BadChange(f"The only source here is {_SOURCE}.", param="source")
            found["model"] = string(source, "model_name", limit=120) or ""
        if body.get("events") is not None:
            short = {kind.removeprefix(_SHORT): kind for kind in KINDS if kind.startswith(_SHORT)}
            try:
                found["kinds"] = check_kinds(short.get(e, e) for e in texts(body["events"], "events", limit=32))
            except EventsError as error:
                raise BadChange(str(error), param="events") from None
        if (name := string(body, "name", limit=120)) is not None:
            found["name"] = name
        if (enabled := boolean(body, "enabled")) is not None:
            found["enabled"] = enabled
        return found

    async def _destination(self, told: Any, account: str) -> str:
        if not isinstance(told, dict) or told.get("type") != "queues.queue":
            raise BadChange('destination is {"type": "queues.queue", "queue_id": "..."}.', param="destination")
        queue_id = string(told, "queue_id", limit=64) or ""
        if await self.look(self.state.queues.find, account, queue_id) is None:
            raise NoSuchObject(f"Account {account} has no queue {queue_id!r}.")
        return queue_id


def _shown(found: Subscription) -> dict[str, Any]:
    source = {"type": _SOURCE} | ({"model_name": found.model} if found.model else {})
    return {
        "id": found.id,
        "name": found.name,
        "created_at": iso(found.created),
        "modified_at": iso(found.modified),
        "enabled": found.enabled,
        "events": [kind.removeprefix(_SHORT) for kind in found.kinds],
        "source": source,
        "destination": {"type": "queues.queue", "queue_id": found.queue},
    }
