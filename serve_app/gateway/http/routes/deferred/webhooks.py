"""Routes about an account's webhooks: who is told of which events, what was sent, and sending it again."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import BadChange, NoSuchObject
from serve_app.api.fields.values import boolean, string, texts
from serve_app.api.listing import paged
from serve_app.api.schema import accounts as shared
from serve_app.api.schema import events as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.accounts.read import at
from serve_app.gateway.http.exchange import ACCOUNT, ADMIN, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.operating.accounts import Management
from serve_app.gateway.webhooks import Receiver, Refused, resolve
from serve_app.state.deferred.events import Delivery, EventsError, Subscription, check_kinds, iso

_TAG = "Webhooks"
_URL = re.compile(r"https?://[^/@\s\x00-\x20]+(/\S*)?", re.ASCII)
MAX_URL = 2000


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = WebhookRoutes(exchange)
    top = ACCOUNT + "/ai/webhooks"
    one, listing, body = shared.object_answer(), shared.list_answer(), schemas.webhook_input()
    listed: list[tuple[str, str, Any, Operation]] = [
        ("GET", top, routes.list, Operation("Webhooks of an account", _TAG, listing)),
        ("POST", top, routes.create,
         Operation("A new webhook, its secret shown once", _TAG, one, body, schemas.WEBHOOK)),
        ("GET", top + "/{webhook}", routes.get, Operation("One webhook", _TAG, one)),
        ("PATCH", top + "/{webhook}", routes.update,
         Operation("Change a webhook, or switch it off and on", _TAG, one, {**body, "required": []}, schemas.WEBHOOK)),
        ("DELETE", top + "/{webhook}", routes.delete, Operation("End a webhook", _TAG, one)),
        ("GET", top + "/{webhook}/deliveries", routes.deliveries,
         Operation("What was sent, the newest first", _TAG, listing, query={"limit": {"type": "integer"}})),
        ("POST", top + "/{webhook}/replay", routes.replay,
         Operation("Send again what was not taken, or all", _TAG, schemas.replay_answer(), schemas.replay_input(),
                   {"since": "2027-01-31T00:00:00Z"})),
    ]  # fmt: skip
    return [Endpoint(*each, scopes=ADMIN, operated=True) for each in listed]


class WebhookRoutes(Management):
    async def list(self, request: Request) -> Response:
        shown = [_shown(each) for each in await self._all(request)]
        return json_answer(paged(shown, request.query_params))

    async def get(self, request: Request) -> Response:
        return json_answer(success(_shown(await self._one(request))))

    async def create(self, request: Request) -> Response:
        fields = await self._fields(await self.exchange.body(request))
        if "url" not in fields or "kinds" not in fields:
            raise BadChange("A webhook needs url and events.", param="events" if "url" in fields else "url")
        account = (await self.account(request.path_params["account"])).name
        try:
            made = await self.look(self.state.events.subscribe, account, time.time(), **fields, by=self.by(request))
        except EventsError as error:
            raise BadChange(str(error)) from None
        return json_answer(success({**_shown(made), "secret": made.secret}))

    async def update(self, request: Request) -> Response:
        known = await self._one(request)
        fields = await self._fields(await self.exchange.body(request))
        changed = await self.look(
            self.state.events.change, known.account, known.id, time.time(), **fields, by=self.by(request)
        )
        return json_answer(success(_shown(changed or known)))

    async def delete(self, request: Request) -> Response:
        known = await self._one(request)
        await self.look(self.state.events.unsubscribe, known.account, known.id, by=self.by(request))
        return json_answer(success({"id": known.id}))

    async def deliveries(self, request: Request) -> Response:
        known, limit = await self._one(request), request.query_params.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= 1000):
            raise BadChange("limit is a number from 1 to 1000.", param="limit")
        found = await self.look(self.state.events.deliveries, known.id, limit=int(limit))
        return json_answer(success([_delivery(each) for each in found]))

    async def replay(self, request: Request) -> Response:
        known, body = await self._one(request), await self.exchange.body(request)
        since = at(body["since"], "since") if body.get("since") is not None else 0.0
        which: dict[str, Any] = {
            "delivery_id": string(body, "delivery", limit=64) or "",
            "everything": boolean(body, "all") or False,
        }
        count = await self.look(self.state.events.replay, known.id, time.time(), since=since, **which)
        return json_answer(success({"replayed": count}))

    async def _all(self, request: Request) -> Sequence[Subscription]:
        account = (await self.account(request.path_params["account"])).name
        return [each for each in await self.look(self.state.events.subscriptions, account) if each.url]

    async def _one(self, request: Request) -> Subscription:
        wanted = request.path_params["webhook"]
        found = next((each for each in await self._all(request) if each.id == wanted), None)
        if found is None:
            raise NoSuchObject(f"Account {request.path_params['account'][:64]} has no webhook {wanted[:64]!r}.")
        return found

    async def _fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """What a body says of a webhook. Raises `BadChange` for a URL that would never be called."""
        found: dict[str, Any] = {}
        if (url := string(body, "url", limit=MAX_URL)) is not None:
            if not _URL.fullmatch(url):
                raise BadChange("url is a http or https URL without user and password.", param="url")
            try:
                await resolve(Receiver(url, "", self.exchange.gateway.webhooks.private))
            except Refused as error:
                raise BadChange(f"url cannot be called: {error}.", param="url") from None
            found["url"] = url
        if body.get("events") is not None:
            try:
                found["kinds"] = check_kinds(texts(body["events"], "events", limit=32))
            except EventsError as error:
                raise BadChange(str(error), param="events") from None
        for name in ("name", "model"):
            if (value := string(body, name, limit=120)) is not None:
                found[name] = value
        if (enabled := boolean(body, "enabled")) is not None:
            found["enabled"] = enabled
        return found


def _shown(webhook: Subscription) -> dict[str, Any]:
    return {
        "id": webhook.id,
        "name": webhook.name,
        "url": webhook.url,
        "events": list(webhook.kinds),
        "model": webhook.model or None,
        "enabled": webhook.enabled,
        "created_at": iso(webhook.created),
        "modified_at": iso(webhook.modified),
    }


def _delivery(sent: Delivery) -> dict[str, Any]:
    return {
        "id": sent.id,
        "event": sent.kind,
        "status": sent.status,
        "at": iso(sent.at),
        "attempts": sent.tries,
        "next_attempt_at": None if sent.due is None else iso(sent.due),
        "delivered_at": None if sent.sent is None else iso(sent.sent),
        "error": sent.trouble or None,
    }
