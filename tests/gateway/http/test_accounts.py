"""Accounts, tokens, members and the audit trail over HTTP, by Cloudflare's own client, and what a key may do where."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cloudflare
import httpx
import pytest
from cloudflare import AsyncCloudflare

from serve_app.api.errors import OutOfCapacity
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http, endpoints
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import SCOPES, hash_key
from tests.waiting import until

KEY = "the operator's key of this test alone"
CHAT = "@cf/pico/pico-instruct"
ELSEWHERE = {"com.cloudflare.api.account.other": "*"}
READS = [{"effect": "allow", "permission_groups": [{"id": "read"}], "resources": {}}]


async def nobody(*_: Any) -> Any:
    raise OutOfCapacity


class Served:
    """Gateways on one store; :meth:`sdk` is Cloudflare's client with a key, at one of them."""

    def __init__(self, home: Path, database: str) -> None:
        self._settings = {"account": "local", "key_hashes": (hash_key(KEY),), "cluster_secret": "s"}
        self._settings |= {"home": str(home), "profile": "local", "database": database}
        self.gateways: list[Gateway] = []
        self.clients: list[httpx.AsyncClient] = []

    async def start(self) -> int:
        gateway = Gateway(GatewaySettings(**self._settings), nobody)
        for model in gateway.models:
            model.ready = True
        await gateway.state.start()
        await gateway.inbox.start()
        self.gateways.append(gateway)
        self.clients.append(
            httpx.AsyncClient(transport=httpx.ASGITransport(build_http(gateway)), base_url="http://here")
        )
        return len(self.gateways) - 1

    def sdk(self, key: str = KEY, at: int = 0) -> AsyncCloudflare:
        transport = self.clients[at]._transport
        return AsyncCloudflare(
            api_token=key,
            base_url="http://here/client/v4",
            http_client=httpx.AsyncClient(transport=transport),
            max_retries=0,
        )

    async def call(self, method: str, path: str, key: str = KEY, at: int = 0, **more: Any) -> httpx.Response:
        return await self.clients[at].request(method, path, headers={"Authorization": f"Bearer {key}"}, **more)

    async def aclose(self) -> None:
        for gateway, client in zip(self.gateways, self.clients, strict=True):
            await client.aclose()
            await gateway.inbox.aclose()
            await asyncio.to_thread(gateway.state.close)


@pytest.fixture
async def served(tmp_path: Path, database: str) -> AsyncIterator[Served]:
    made = Served(tmp_path, database)
    await made.start()
    yield made
    await made.aclose()


async def refused(call: Callable[[], Any], status: int) -> str:
    """The message of the refusal."""
    with pytest.raises(cloudflare.APIStatusError) as caught:
        await call()
    assert caught.value.status_code == status, caught.value.message
    assert caught.value.errors[0].code and caught.value.response.json()["success"] is False
    return caught.value.errors[0].message or ""


async def test_what_clients_call_first(served):
    sdk = served.sdk()
    told = await sdk.user.tokens.verify()
    assert (told.id, told.status) == (hash_key(KEY)[:12], "active")
    assert (await sdk.accounts.tokens.verify(account_id="local")).id == told.id
    assert (await sdk.user.get()).id == "local"
    assert [account.id async for account in sdk.accounts.list()] == ["local"]
    assert [each.account.id async for each in sdk.memberships.list()] == ["local"]
    raw = (await served.call("GET", "/client/v4/user/tokens/verify")).json()
    assert raw["messages"][0]["message"] == "This API Token is valid and active"
    await refused(served.sdk("wrong wrong wrong").user.tokens.verify, 401)


async def test_accounts_and_tokens_by_cloudflares_client(served):
    sdk = served.sdk()
    account = await sdk.accounts.create(name="Team A (EU)", type="standard")
    assert (account.id, account.name) == ("team-a-eu", "Team A (EU)")
    assert {each.id async for each in sdk.accounts.list()} == {"local", "team-a-eu"}
    assert [each.id async for each in sdk.accounts.list(name="Team A (EU)")] == ["team-a-eu"]
    changed = await sdk.accounts.update(account_id=account.id, id=account.id, name="Team A", type="standard")
    assert changed.name == "Team A" == (await sdk.accounts.get(account_id=account.id)).name
    groups = {group.name: group.id async for group in sdk.accounts.tokens.permission_groups.list(account_id=account.id)}
    assert {"inference", "read", "admin", "Workers AI Read"} <= set(groups)
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)
    resources = {f"com.cloudflare.api.account.{account.id}": "*"}
    policy = {"effect": "allow", "permission_groups": [{"id": groups["Workers AI Read"]}], "resources": resources}
    tokens = sdk.accounts.tokens
    made = await tokens.create(account_id=account.id, name="ci", policies=[policy], expires_on=until)
    assert made.value and made.status == "active" and made.expires_on == until and made.issued_on
    assert [group.id for group in made.policies[0].permission_groups] == ["inference", "read"]
    # The gateway that made it takes it at once; the value is told nowhere again.
    theirs = served.sdk(made.value)
    assert (await theirs.user.tokens.verify()).expires_on == until
    assert [each.id async for each in theirs.accounts.list()] == [account.id]
    listed = [each async for each in tokens.list(account_id=account.id)]
    assert [each.id for each in listed] == [made.id]
    shown = await served.call("GET", f"/client/v4/accounts/{account.id}/tokens/{made.id}")
    assert "value" not in shown.json()["result"] and made.value not in shown.text
    # Rolled: the id stays, the value that was is refused.
    value = await tokens.value.update(account_id=account.id, token_id=made.id)
    assert value != made.value and (await served.sdk(value).user.tokens.verify()).id == made.id
    await refused(theirs.user.tokens.verify, 401)
    # Changed, disabled, ended.
    await tokens.update(account_id=account.id, token_id=made.id, name="later", policies=READS, status="disabled")
    found = await tokens.get(account_id=account.id, token_id=made.id)
    assert (found.name, found.status, found.expires_on) == ("later", "disabled", until)
    assert "disabled" in await refused(served.sdk(value).user.tokens.verify, 401)
    assert (await tokens.delete(account_id=account.id, token_id=made.id)).id == made.id
    await refused(lambda: tokens.get(account_id=account.id, token_id=made.id), 404)
    assert (await sdk.accounts.delete(account_id=account.id)).id == account.id
    await refused(lambda: sdk.accounts.get(account_id=account.id), 404)
    await refused(lambda: sdk.accounts.delete(account_id="local"), 400)


@pytest.mark.filterwarnings("ignore:Use /accounts:DeprecationWarning")  # what the client says of its own paths
async def test_tokens_of_ones_own_and_members(served):
    sdk = served.sdk()
    # The account of the settings needs no entry to have keys and members.
    own = await sdk.user.tokens.create(name="mine", policies=READS)
    assert {each.id async for each in sdk.user.tokens.list()} == {own.id}
    roles = {role.id: role async for role in sdk.accounts.roles.list(account_id="local")}
    assert set(roles) == set(SCOPES) and (await sdk.accounts.roles.get("read", account_id="local")).name == "read"
    ann = await sdk.accounts.members.create(account_id="local", email="ann@example.com", roles=["read", "admin"])
    assert ann.status == "accepted" and {role.id for role in ann.roles} == {"read", "admin"}
    await refused(lambda: sdk.accounts.members.create(account_id="local", email="ann@example.com", roles=["read"]), 409)
    body = {"name": "ann's", "scopes": ["read", "admin", "inference"], "member": ann.id}
    hers = (await served.call("POST", "/client/v4/accounts/local/tokens", json=body)).json()["result"]
    ann_sdk = served.sdk(hers["value"])
    assert (await ann_sdk.user.get()).email == "ann@example.com"
    # What she makes is hers, and all that she sees below /user.
    more = await ann_sdk.user.tokens.create(name="more", policies=READS)
    assert {each.id async for each in ann_sdk.user.tokens.list()} == {hers["id"], more.id}
    await refused(lambda: ann_sdk.user.tokens.get(own.id), 404)
    assert "inference" in await refused(lambda: ann_sdk.ai.run(CHAT, account_id="local", prompt="x"), 403)
    await sdk.accounts.members.update(ann.id, account_id="local", roles=[{"id": "read"}])
    assert "admin" in await refused(lambda: ann_sdk.user.tokens.create(name="x", policies=READS), 403)
    assert [each.email async for each in sdk.accounts.members.list(account_id="local")] == ["ann@example.com"]
    assert (await sdk.accounts.members.delete(ann.id, account_id="local")).id == ann.id
    await refused(ann_sdk.user.tokens.verify, 401)
    await refused(served.sdk(more.value).user.tokens.verify, 401)
    assert (await served.sdk(own.value).user.tokens.verify()).id == own.id


async def test_an_admin_manages_the_own_account_and_the_operator_all(served):
    sdk = served.sdk()
    keys = {}
    for name in ("team-a", "team-b"):
        account = await sdk.accounts.create(name=name)
        body = {"name": "boss", "scopes": ["admin"]}
        made = await served.call("POST", f"/client/v4/accounts/{account.id}/tokens", json=body)
        keys[name] = made.json()["result"]["value"]
    boss = served.sdk(keys["team-a"])
    made = await boss.accounts.tokens.create(account_id="team-a", name="ci", policies=READS)
    assert made.value
    await boss.accounts.update(account_id="team-a", id="team-a", name="The A team", type="standard")
    for account in ("team-b", "local"):
        await refused(lambda account=account: boss.accounts.get(account_id=account), 403)
        await refused(
            lambda account=account: boss.accounts.tokens.create(account_id=account, name="x", policies=READS), 403
        )
    assert "only keys of account local" in await refused(lambda: boss.accounts.create(name="mine"), 403)
    await refused(lambda: boss.accounts.delete(account_id="team-a"), 403)
    raised = await served.call("PUT", "/client/v4/accounts/team-a", keys["team-a"], json={"weight": 900})
    assert raised.status_code == 403
    raised = await served.call("PUT", "/client/v4/accounts/team-a", json={"weight": 3, "limits": {"streams": 4}})
    assert (raised.json()["result"]["weight"], raised.json()["result"]["limits"]) == (3.0, {"streams": 4})
    # Who manages all accounts runs models for its own only.
    answer = await served.call("POST", f"/client/v4/accounts/team-a/ai/run/{CHAT}", json={"prompt": "x"})
    assert answer.status_code == 403
    # Everybody sees who changed their own; the operator sees all.
    day = {"since": "2020-01-01", "before": "2099-01-01"}
    theirs = [entry async for entry in boss.accounts.logs.audit.list(account_id="team-a", **day, limit=2)]
    said = [(e.action.type, e.resource.type) for e in theirs]
    assert said == [
        ("update", "account"),
        ("update", "account"),
        ("create", "key"),
        ("create", "key"),
        ("create", "account"),
    ]
    boss_id, operator = hash_key(keys["team-a"])[:12], hash_key(KEY)[:12]
    assert [e.actor.token_id for e in theirs] == [operator, boss_id, boss_id, operator, operator]
    assert theirs[2].resource.id == made.id and theirs[2].raw.cf_rayid and theirs[2].action.time
    every = (await served.call("GET", "/client/v4/user/audit_logs?limit=500")).json()["result"]
    assert {entry["account"]["id"] for entry in every} == {"team-a", "team-b"} and len(every) == 7
    assert (await served.call("GET", "/client/v4/user/audit_logs", keys["team-b"])).json()["result_info"]["count"] == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"name": "x"}, "policies"),
        ({"policies": READS}, "name"),
        ({"name": "x", "policies": [{**READS[0], "effect": "deny"}]}, "allow"),
        ({"name": "x", "policies": [{**READS[0], "permission_groups": [{"id": "DNS Write"}]}]}, "DNS Write"),
        ({"name": "x", "policies": [{**READS[0], "resources": ELSEWHERE}]}, "one account"),
        ({"name": "x", "policies": READS, "condition": {"request_ip": {"in": ["10.0.0.0/8"]}}}, "condition"),
        ({"name": "x", "policies": READS, "expires_on": "2020-01-01T00:00:00Z"}, "past"),
        ({"name": "x", "policies": READS, "expires_on": "soon"}, "is a time such as"),
        ({"name": "x", "scopes": ["root"]}, "root"),
        ({"name": "x", "scopes": ["read"], "priority": "high"}, "priority"),
        ({"name": "x", "scopes": ["read"], "limits": {"cows": 1}}, "cows"),
        ({"name": "x", "scopes": ["read"], "limits": {"plan": "paid"}}, "plan is a limit of accounts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_cannot_be_enforced_is_refused(served, body, says):
    answer = await served.call("POST", "/client/v4/user/tokens", json=body)
    assert answer.status_code == 400 and says in answer.json()["errors"][0]["message"], answer.text
    assert answer.json()["result"] is None
    assert (await served.call("GET", "/client/v4/user/tokens")).json()["result"] == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_every_route_asks_for_its_scope(served):
    """Each scope by itself: whatever is not its is refused, in words that say what is missing; the rest goes on."""
    keys = {}
    for scope in SCOPES:
        body = {"name": scope, "scopes": [scope]}
        made = await served.call("POST", "/client/v4/accounts/local/tokens", json=body)
        keys[scope] = made.json()["result"]["value"]
    ways = {}
    for endpoint in endpoints(served.gateways[0]):
        ways.setdefault(endpoint.scopes, []).append(endpoint)
        if endpoint.scopes is None:
            continue
        path = endpoint.path.replace("{account}", "local").replace("{model:path}", CHAT)
        for scope in SCOPES:
            if scope == "admin" and endpoint.method != "GET" and "admin" in endpoint.scopes:
                continue  # which would end the account and its keys
            answer = await served.call(endpoint.method, path, keys[scope])
            if not endpoint.scopes or scope in endpoint.scopes:
                assert "lacks the scope" not in answer.text, (endpoint.method, path, scope)
                continue
            assert answer.status_code == 403, (endpoint.method, path, scope, answer.text)
            assert f"lacks the scope {' or '.join(endpoint.scopes)}; it has {scope}" in answer.text
    assert {None, (), ("inference",), ("read",), ("inference", "read"), ("admin",)} <= set(ways)
    # Nothing that runs a model or changes something is open to a key that may only read: what it may POST asks.
    asks = re.compile(r"/api/show$|/graphql$|/estimate\b")
    reads = [endpoint for scopes, found in ways.items() if scopes and "read" in scopes for endpoint in found]
    assert [e.path for e in reads if e.method != "GET" and not asks.search(e.path)] == []
    assert all(e.path.startswith("/client/v4/") for e in ways["admin",])


async def test_a_revoked_and_an_expired_key_are_refused_by_every_gateway_within_a_second(served):
    """By the gateways' own looks at the store: the next but one that begins after the change has told all of them."""
    await served.start()
    sdk = served.sdk()
    made = await sdk.user.tokens.create(name="x", policies=READS)
    other = served.sdk(made.value, at=1)
    async with asyncio.timeout(60):
        while (await served.call("GET", "/v1/models", made.value, at=1)).status_code != 200:
            await asyncio.sleep(0.02)
    looks: list[int] = []
    look = served.gateways[1].state._store.revisions
    served.gateways[1].state._store.revisions = lambda: (looks.append(1), look())[1]
    await sdk.user.tokens.delete(made.id)
    looks.clear()
    await refused(served.sdk(made.value).user.tokens.verify, 401)
    await until(lambda: len(looks) >= 2)
    await refused(other.user.tokens.verify, 401)
    # Expiry needs no look at all.
    soon = datetime.now(UTC) + timedelta(hours=1)
    made = await sdk.user.tokens.create(name="x", policies=READS, expires_on=soon)
    for at in (0, 1):
        gateway = served.gateways[at]
        await until(lambda accounts=gateway.state.accounts: made.id in accounts._keys)
        gateway.state.accounts._clock = soon.timestamp
        assert "has expired" in await refused(served.sdk(made.value, at=at).user.tokens.verify, 401)


async def test_a_new_key_is_kept_in_no_answer_of_an_idempotency_key(served):
    headers = {"Idempotency-Key": "once"}
    values = set()
    for _ in range(2):
        answer = await served.clients[0].post(
            "/client/v4/user/tokens",
            json={"name": "x", "policies": READS},
            headers={**headers, "Authorization": f"Bearer {KEY}"},
        )
        values.add(answer.json()["result"]["value"])
    assert len(values) == 2


async def test_the_store_is_away(served):
    def lost(*_: Any, **__: Any) -> Any:
        from serve_app.state.errors import Away

        raise Away("the test took it away")

    served.gateways[0].state.admin._database._transaction = lost
    served.gateways[0].state.admin.keys._database._transaction = lost
    assert (await served.call("GET", "/client/v4/user/tokens/verify")).status_code == 200
    answer = await served.call("POST", "/client/v4/user/tokens", json={"name": "x", "policies": READS})
    assert answer.status_code == 503 and answer.headers["retry-after"]
