"""Webhooks over HTTP: who may manage them, and which URLs are refused at once."""

from __future__ import annotations

import time

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch
from tests.gateway.http.test_accounts import KEY, served  # noqa: F401

TOP = "/client/v4/accounts/local/ai/webhooks"
PUBLIC = "https://1.1.1.1/hook"


async def test_a_webhook_from_its_beginning_to_its_end(served):  # noqa: F811
    made = (await served.call("POST", TOP, json={"url": PUBLIC, "events": ["batch.*"], "name": "ci"})).json()["result"]
    assert made["secret"].startswith("whsec_") and made["enabled"] is True
    (listed,) = (await served.call("GET", TOP)).json()["result"]
    assert listed == {name: value for name, value in made.items() if name != "secret"}
    one = f"{TOP}/{made['id']}"
    changed = (await served.call("PATCH", one, json={"enabled": False, "events": ["*"]})).json()["result"]
    assert (changed["enabled"], changed["events"], changed["name"]) == (False, ["*"], "ci")
    await served.call("PATCH", one, json={"enabled": True})
    store = served.gateways[0].state._store
    with store.database.writing() as connection:
        ended = Batch("b" * 32, "openai", Caller("local"), 0.0, 0.0, 0.0, "failed")
        store.events.batch(connection, ended, time.time())
    (sent,) = (await served.call("GET", one + "/deliveries")).json()["result"]
    assert (sent["event"], sent["status"], sent["attempts"]) == ("batch.failed", "waiting", 0)
    store.events.delivered(sent["id"], time.time())
    replayed = [
        (await served.call("POST", one + "/replay", json=body)).json()["result"] for body in ({}, {"all": True})
    ]
    assert replayed == [{"replayed": 0}, {"replayed": 1}]
    assert (await served.call("DELETE", one)).json()["result"] == {"id": made["id"]}
    assert (await served.call("GET", one)).status_code == 404


async def test_what_is_refused(served):  # noqa: F811
    for body, said in (
        ({"url": "http://127.0.0.1/x", "events": ["*"]}, "SERVE_APP_WEBHOOK_PRIVATE=true allows it"),
        ({"url": "http://[::ffff:10.0.0.1]:80/x", "events": ["*"]}, "no public address"),
        ({"url": "ftp://1.1.1.1/", "events": ["*"]}, "http or https"),
        ({"url": "https://u:p@1.1.1.1/", "events": ["*"]}, "without user"),
        ({"url": PUBLIC, "events": ["batch.done"]}, "no event 'batch.done'"),
        ({"url": PUBLIC}, "needs url and events"),
    ):
        answer = await served.call("POST", TOP, json=body)
        assert answer.status_code == 400 and said in answer.json()["errors"][0]["message"], answer.text
    sdk = served.sdk()
    policies = [{"effect": "allow", "permission_groups": [{"id": "inference"}], "resources": {}}]
    runs = await sdk.accounts.tokens.create(account_id="local", name="runs", policies=policies)
    assert (await served.call("GET", TOP, runs.value)).status_code == 403
    assert (await served.call("GET", TOP, KEY)).json()["result"] == []
