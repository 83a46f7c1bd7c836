"""Routes about accounts, their members and who changed them, on Cloudflare's paths. Tokens: see `account_tokens.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import AlreadyThere, BadChange, NoSuchObject, OperatorOnly
from serve_app.api.listing import paged
from serve_app.api.schema import accounts as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.accounts import read, scopes, write
from serve_app.gateway.http import request_id
from serve_app.gateway.http.auth import is_operator
from serve_app.gateway.http.exchange import ACCOUNT, ADMIN, Endpoint, Exchange, json_answer
from serve_app.state.callers.accounts import Account, Caller, Member
from serve_app.state.callers.audit import Actor
from serve_app.state.errors import AccountsError, Missing, Taken
from serve_app.state.reader import plausible
from serve_app.state.state import State

TAG = "Accounts"
USER = "/client/v4/user"
_PAGED = {"page": {"type": "integer", "minimum": 1}, "per_page": {"type": "integer", "minimum": 1}}
_AUDIT: dict[str, Any] = {
    "since": {"type": "string"},
    "before": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
    "cursor": {"type": "string"},
    "direction": {"type": "string", "enum": ["asc", "desc"]},
}
_P = ParamSpec("_P")
_T = TypeVar("_T")


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = AccountRoutes(exchange)
    top, members = "/client/v4/accounts", ACCOUNT + "/members"
    account, member = schemas.account_input(), schemas.member_input()
    one, listing = schemas.object_answer(), schemas.list_answer()

    def key(method: str, path: str, handler: Any, about: Operation) -> Endpoint:
        return Endpoint(method, path, handler, about, scopes=(), operated=True)

    def admin(method: str, path: str, handler: Any, about: Operation) -> Endpoint:
        return Endpoint(method, path, handler, about, scopes=ADMIN, operated=True)

    return [
        key("GET", USER, routes.user, Operation("Who holds this key", TAG, one)),
        key("GET", "/client/v4/memberships", routes.memberships, Operation("Accounts of this key", TAG, listing)),
        admin("GET", USER + "/audit_logs", routes.audit_all, _about("Who changed what, of all accounts", _AUDIT)),
        key("GET", top, routes.list, Operation("Accounts", TAG, listing, query={"name": {"type": "string"}, **_PAGED})),
        admin("POST", top, routes.create, Operation("A new account", TAG, one, account, {"name": "Team A"})),
        key("GET", ACCOUNT, routes.get, Operation("One account", TAG, one)),
        admin("PUT", ACCOUNT, routes.update, Operation("Change an account", TAG, one, account, {"name": "Team A"})),
        admin("DELETE", ACCOUNT, routes.delete, Operation("End an account and all its keys", TAG, one)),
        admin("GET", members, routes.members, _about("Members of an account", _PAGED)),
        admin("POST", members, routes.add_member, Operation("A new member", TAG, one, member, schemas.MEMBER)),
        admin("GET", members + "/{member}", routes.member, Operation("One member", TAG, one)),
        admin("PUT", members + "/{member}", routes.change_member,
              Operation("Change a member's roles", TAG, one, schemas.roles_input(), {"roles": [{"id": "read"}]})),
        admin("DELETE", members + "/{member}", routes.remove_member,
              Operation("End a membership and the member's keys", TAG, one)),
        key("GET", ACCOUNT + "/roles", routes.roles, _about("Roles of members", _PAGED)),
        key("GET", ACCOUNT + "/roles/{role}", routes.role, Operation("One role", TAG, one)),
        admin("GET", ACCOUNT + "/logs/audit", routes.audit, _about("Who changed what in an account", _AUDIT)),
    ]  # fmt: skip


def _about(summary: str, query: dict[str, Any]) -> Operation:
    return Operation(summary, TAG, schemas.list_answer(), query=query)


class Management:
    """What routes about accounts and about tokens share: the store, and who asks."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    @property
    def state(self) -> State:
        return self.exchange.gateway.state

    @property
    def operator(self) -> str:
        """The account of the settings."""
        return self.exchange.gateway.settings.account

    async def look(self, look: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await _as_told(self.state.look(look, *args, **kwargs))

    async def change(self, change: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Done in the store, and known to this gateway when it returns."""
        return await _as_told(self.state.change(change, *args, **kwargs))

    async def account(self, name: str) -> Account:
        """Raises `NoSuchObject`. The account of the settings is there in any case."""
        found = await self.look(self.state.admin.all, name) if plausible(name) else {}
        if name not in found and name != self.operator:
            raise NoSuchObject(f"There is no account {name[:64]!r}.")
        return found.get(name) or Account(name)

    async def entry(self, name: str, by: Actor) -> str:
        """The name of an account that there is. That of the settings may have no entry yet, which keys and members
        need: then it has one. Raises `NoSuchObject`.
        """
        await self.account(name)
        if name == self.operator:
            await self.change(self.state.admin.ensure, name, by=by)
        return name

    def operates(self, request: Request) -> bool:
        return is_operator(request.state.caller, self.operator)

    @staticmethod
    def by(request: Request) -> Actor:
        return Actor(request.state.caller.key, "api", request_id.current.get())


class AccountRoutes(Management):
    async def user(self, request: Request) -> Response:
        caller = request.state.caller
        return json_answer(success(write.user(caller, await self._holder(caller))))

    async def memberships(self, request: Request) -> Response:
        caller = request.state.caller
        holder = await self._holder(caller)
        name = caller.key if holder is None else holder.id
        shown = write.account(await self.account(caller.account))
        entry = {"id": name, "status": "accepted", "account": shown, "roles": sorted(caller.scopes)}
        return json_answer(paged([entry], request.query_params))

    async def list(self, request: Request) -> Response:
        caller = request.state.caller
        if self.operates(request):
            known = await self.look(self.state.admin.all)
            own = known.pop(self.operator, Account(self.operator))
            found = [own, *known.values()]
        else:
            found = [await self.account(caller.account)]
        wanted = request.query_params.get("name", "")
        shown = [write.account(each) for each in found]
        return json_answer(paged([each for each in shown if wanted in ("", each["name"])], request.query_params))

    async def create(self, request: Request) -> Response:
        self._operator(request, "make accounts")
        body = await self.exchange.body(request)
        fields, name = read.account_fields(body), read.account_id(body)
        if fields.get("label") == name:
            fields["label"] = ""
        if name == self.operator:
            raise AlreadyThere(f"{name} is the account of the settings. Choose another name.")
        made = await self.change(self.state.admin.create, name, by=self.by(request), **fields)
        return json_answer(success(write.account(made)))

    async def get(self, request: Request) -> Response:
        return json_answer(success(write.account(await self.account(request.path_params["account"]))))

    async def update(self, request: Request) -> Response:
        fields = read.account_fields(await self.exchange.body(request))
        if {"weight", "limits"} & fields.keys():
            self._operator(request, "change weight and limits of an account")
        name = await self.entry(request.path_params["account"], self.by(request))
        changed = await self.change(self.state.admin.change, name, by=self.by(request), **fields)
        return json_answer(success(write.account(changed)))

    async def delete(self, request: Request) -> Response:
        self._operator(request, "end accounts")
        name = request.path_params["account"]
        if name == self.operator:
            raise BadChange(f"{name} is the account of the settings, which stays. Remove its keys one by one.")
        await self.account(name)
        await self.change(self.state.admin.remove, name, by=self.by(request))
        return json_answer(success({"id": name}))

    async def members(self, request: Request) -> Response:
        account = await self.account(request.path_params["account"])
        return json_answer(paged([write.member(each) for each in account.members], request.query_params))

    async def member(self, request: Request) -> Response:
        account, wanted = await self.account(request.path_params["account"]), request.path_params["member"]
        return json_answer(success(write.member(_member(account, wanted))))

    async def add_member(self, request: Request) -> Response:
        body = await self.exchange.body(request)
        name = await self.entry(request.path_params["account"], self.by(request))
        create = self.state.admin.members.create
        made = await self.change(
            create, name, str(body.get("email", "")), read.member_scopes(body), by=self.by(request)
        )
        return json_answer(success(write.member(made)))

    async def change_member(self, request: Request) -> Response:
        name, wanted = request.path_params["account"], request.path_params["member"]
        scopes = read.member_scopes(await self.exchange.body(request))
        _member(await self.account(name), wanted)
        changed = await self.change(self.state.admin.members.change, name, wanted, scopes, by=self.by(request))
        return json_answer(success(write.member(changed)))

    async def remove_member(self, request: Request) -> Response:
        name, wanted = request.path_params["account"], request.path_params["member"]
        _member(await self.account(name), wanted)
        await self.change(self.state.admin.members.remove, name, wanted, by=self.by(request))
        return json_answer(success({"id": wanted}))

    async def roles(self, request: Request) -> Response:
        return json_answer(paged(scopes.roles(), request.query_params))

    async def role(self, request: Request) -> Response:
        wanted = request.path_params["role"]
        found = next((role for role in scopes.roles() if role["id"] == wanted), None)
        if found is None:
            raise NoSuchObject(f"There is no role {wanted[:60]!r}.")
        return json_answer(success(found))

    async def audit(self, request: Request) -> Response:
        return await self._audit(request, (await self.account(request.path_params["account"])).name)

    async def audit_all(self, request: Request) -> Response:
        return await self._audit(request, None if self.operates(request) else request.state.account)

    async def _audit(self, request: Request, account: str | None) -> Response:
        asked = read.audit_query(request.query_params)
        found = await self.look(self.state.admin.audit.read, account, **asked)
        after = found[-1].id if len(found) == asked["limit"] else None
        info = {"count": len(found), "cursors": {"after": after} if after else {}}
        return json_answer(success([write.change(each) for each in found], result_info=info))

    async def _holder(self, caller: Caller) -> Member | None:
        account = await self.account(caller.account) if caller.member else None
        return next((each for each in account.members if each.id == caller.member), None) if account else None

    def _operator(self, request: Request, what: str) -> None:
        if not self.operates(request):
            raise OperatorOnly(what, self.operator)


def _member(account: Account, wanted: str) -> Member:
    found = next((each for each in account.members if each.id == wanted), None)
    if found is None:
        raise NoSuchObject(f"Account {account.name} has no member {wanted[:64]!r}.")
    return found


async def _as_told(asked: Awaitable[_T]) -> _T:
    """What the store refuses, as clients are told."""
    try:
        return await asked
    except Missing as error:
        raise NoSuchObject(str(error)) from None
    except Taken as error:
        raise AlreadyThere(str(error)) from None
    except AccountsError as error:
        raise BadChange(str(error)) from None
