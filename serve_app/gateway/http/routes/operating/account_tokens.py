"""Routes about API keys, which Cloudflare calls tokens: of the key's own account below `/user`, and of any account that
it may manage below `/accounts/{account}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import NoSuchObject
from serve_app.api.listing import paged
from serve_app.api.schema import accounts as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.accounts import read, scopes, write
from serve_app.gateway.http.exchange import ACCOUNT, ADMIN, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.operating.accounts import TAG, USER, Management
from serve_app.state.callers.accounts import Key

_VALID = "This API Token is valid and active"
_PAGED = {"page": {"type": "integer", "minimum": 1}, "per_page": {"type": "integer", "minimum": 1}}


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = TokenRoutes(exchange)
    one, listing, body = schemas.object_answer(), schemas.list_answer(), schemas.token_input()
    text = schemas.text_answer()
    found: list[Endpoint] = []
    for prefix in (USER, ACCOUNT):
        tokens = prefix + "/tokens"
        listed: list[tuple[str, str, Any, Operation, bool]] = [
            ("GET", tokens + "/verify", routes.verify, Operation("Whether this key is good", TAG, one), False),
            ("GET", tokens + "/permission_groups", routes.groups,
             Operation("What keys can be allowed", TAG, listing), False),
            ("GET", tokens, routes.list, Operation("Keys of an account", TAG, listing, query=_PAGED), True),
            ("POST", tokens, routes.create, Operation("A new key, shown once", TAG, one, body, schemas.TOKEN), True),
            ("GET", tokens + "/{token}", routes.get, Operation("One key", TAG, one), True),
            ("PUT", tokens + "/{token}", routes.update,
             Operation("Change a key", TAG, one, schemas.token_changes(), schemas.TOKEN), True),
            ("PUT", tokens + "/{token}/value", routes.roll,
             Operation("Roll a key: another value, shown once", TAG, text), True),
            ("DELETE", tokens + "/{token}", routes.delete, Operation("End a key", TAG, one), True),
        ]  # fmt: skip
        found += [
            Endpoint(method, path, handler, about, scopes=ADMIN if admin else (), operated=True)
            for method, path, handler, about, admin in listed
        ]
    return found


class TokenRoutes(Management):
    """Below ``/user``, a key that belongs to a member sees and makes that member's keys only."""

    async def verify(self, request: Request) -> Response:
        caller = request.state.caller
        told = [{"code": 10000, "message": _VALID, "type": None}]
        return json_answer({**success(write.verified(caller, self.state.accounts.key(caller))), "messages": told})

    async def groups(self, request: Request) -> Response:
        return json_answer(success(scopes.groups()))

    async def list(self, request: Request) -> Response:
        account = self._account(request)
        shown = [write.token(key, account) for key in await self._keys(request)]
        return json_answer(paged(shown, request.query_params))

    async def get(self, request: Request) -> Response:
        return json_answer(success(write.token(await self._key(request), self._account(request))))

    async def create(self, request: Request) -> Response:
        account, body = self._account(request), await self.exchange.body(request)
        fields = read.token_fields(body, account, new=True)
        fields["member"] = self._holder(request) or str(body.get("member") or "")
        await self.entry(account, self.by(request))
        key, value = await self.change(self.state.admin.keys.create, account, by=self.by(request), **fields)
        return json_answer(success(write.token(key, account, value)))

    async def update(self, request: Request) -> Response:
        account, key = self._account(request), await self._key(request)
        fields = read.token_fields(await self.exchange.body(request), account, new=False)
        changed = await self.change(self.state.admin.keys.change, account, key.id, by=self.by(request), **fields)
        return json_answer(success(write.token(changed, account)))

    async def roll(self, request: Request) -> Response:
        account, key = self._account(request), await self._key(request)
        return json_answer(success(await self.change(self.state.admin.keys.roll, account, key.id, by=self.by(request))))

    async def delete(self, request: Request) -> Response:
        account, key = self._account(request), await self._key(request)
        await self.change(self.state.admin.keys.remove, account, key.id, by=self.by(request))
        return json_answer(success({"id": key.id}))

    @staticmethod
    def _account(request: Request) -> str:
        return request.path_params.get("account") or request.state.account

    @staticmethod
    def _holder(request: Request) -> str:
        """The member whose keys alone this is about."""
        return "" if "account" in request.path_params else request.state.caller.member

    async def _keys(self, request: Request) -> Sequence[Key]:
        found, holder = await self.account(self._account(request)), self._holder(request)
        return [key for key in found.keys if not holder or key.member == holder]

    async def _key(self, request: Request) -> Key:
        wanted = request.path_params["token"]
        found = next((key for key in await self._keys(request) if key.id == wanted), None)
        if found is None:
            raise NoSuchObject(f"Account {self._account(request)} has no key {wanted[:64]!r}.")
        return found
