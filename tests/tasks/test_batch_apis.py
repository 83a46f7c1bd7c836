"""What comes in by the APIs of batches, before anything of it runs: accepted on disk, or refused with the reason."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import orjson
import pytest

from serve_app.state.deferred.batches import unpack
from serve_app.state.errors import Away
from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_backend import TURN, EchoBackend

JSONL = "application/jsonl"
CHATS = "/v1/chat/completions"


@pytest.fixture
async def echo(serve, record):
    model = record("text-generation", "decode")
    async with serve(models=(model,), batch_max_requests=2000) as served:
        served.model = model
        served.gateway.backends[model] = EchoBackend()
        # Nothing of a batch is told when a model loads: it waits for it.
        next(iter(served.gateway.models)).ready = False
        yield served


def chat(model: str, i: int, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": f"word {i}"}], **more}
    return {"custom_id": f"r{i}", "method": "POST", "url": CHATS, "body": body}


async def uploaded(http: httpx.AsyncClient, rows: Any, **more: Any) -> httpx.Response:
    data = rows if isinstance(rows, bytes) else b"\n".join(orjson.dumps(row) for row in rows)
    form = {"purpose": "batch", **more.pop("data", {})}
    return await http.post("/v1/files", files={"file": ("in.jsonl", data, JSONL)}, data=form, **more)


async def created(http: httpx.AsyncClient, file: str, **more: Any) -> httpx.Response:
    asked = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h", **more}
    return await http.post("/v1/batches", json=asked)


async def requests(served: Any, batch_id: str) -> list[Any]:
    """What lies in the shards."""
    state = served.gateway.state
    shards = await asyncio.to_thread(state.batches.shards, batch_id)
    return [request for shard in shards for request in unpack(state.files.get(shard.blob))]


# -- Workers AI


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ({"queueRequest": "true"}, {}),
        ({}, {"queueRequest": True}),
        ({}, {"options": {"queueRequest": True}}),
        ({"queueRequest": "true"}, {"text": "", "prompt": ""}),
    ],
)
async def test_native_requests_are_queued_and_polled(echo, query, body):
    run = f"{ACCOUNT}/run/{echo.model}"
    listed = [{"prompt": "one", "external_reference": "a"}, {"messages": TURN, "stream": True}]
    answer = await echo.http.post(run, params=query, json={**body, "requests": listed})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told == {"result": told["result"], "success": True, "errors": [], "messages": []}
    request_id = told["result"].pop("request_id")
    assert told["result"] == {"status": "queued", "model": echo.model}
    assert [(r.id, orjson.loads(r.body)) for r in await requests(echo, request_id)] == [
        ("a", {"prompt": "one"}), (None, {"messages": TURN})
    ]  # fmt: skip
    for polled in (
        await echo.http.post(run, params=query, json={"text": "", "request_id": request_id}),
        await echo.http.post(run, json={"request_id": request_id}),
        await echo.http.post(f"{ACCOUNT}/run", json={"model": echo.model, "input": {"request_id": request_id}}),
        await echo.http.get(run, params={"request_id": request_id}),
    ):
        assert polled.json()["result"] == {"status": "queued", "request_id": request_id, "model": echo.model}
    assert not echo.settled


async def test_a_single_request_may_be_queued(echo):
    answer = await echo.http.post(f"{ACCOUNT}/run/{echo.model}?queueRequest=true", json={"prompt": "one", "seed": 3})
    (only,) = await requests(echo, answer.json()["result"]["request_id"])
    assert orjson.loads(only.body) == {"prompt": "one", "seed": 3}


async def test_native_items_that_are_wrong_are_their_own_results_unless_all_are(echo):
    run = f"{ACCOUNT}/run/{echo.model}?queueRequest=true"
    answer = await echo.http.post(run, json={"requests": [{"prompt": "one"}, {"prompt": "two", "temperature": 9}, 5]})
    request_id = answer.json()["result"]["request_id"]
    batch = (await echo.http.get(f"{ACCOUNT}/batches/{request_id}")).json()["result"]
    assert batch["requests"] == {
        "total": 3, "waiting": 1, "succeeded": 0, "failed": 2, "cancelled": 0, "expired": 0
    }  # fmt: skip
    results = (await echo.http.get(f"{ACCOUNT}/batches/{request_id}/results")).text.splitlines()
    assert [orjson.loads(line)["id"] for line in results] == [1, 2]
    for wrong, words in (
        ([{"prompt": "x", "temperature": 9}, {"prompt": ""}], "request 0: .*temperature.* request 1: "),
        ([], "at least one"),
        (3, "an array"),
        ([{"prompt": "x"}] * 2001, "at most 2000"),
    ):
        refused = await echo.http.post(run, json={"requests": wrong})
        assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006
        assert re.search(words, refused.json()["errors"][0]["message"]), refused.text
    assert len(echo.gateway.state.files.list("batches/")) == 2  # nothing of the refused


async def test_what_is_too_large_or_for_nobody_is_refused(echo):
    run = f"{ACCOUNT}/run/{echo.model}?queueRequest=true"
    refused = await echo.http.post(run, json={"requests": [{"prompt": "x" * 10_000_001}]})
    assert refused.status_code == 413 and refused.json()["errors"][0]["code"] == 3006
    unknown = await echo.http.post(f"{ACCOUNT}/run/@cf/no/such?queueRequest=true", json={"requests": [{"prompt": "x"}]})
    assert unknown.json()["errors"][0]["code"] == 5007
    # A single request has the bound of its task still.
    large = await echo.http.post(f"{ACCOUNT}/run/{echo.model}", json={"prompt": "x" * (1 << 20)})
    assert large.status_code == 413 and large.json()["errors"][0]["code"] == 3006
    for request_id in ("0" * 32, "x", ""):
        missing = await echo.http.post(run, json={"request_id": request_id})
        assert missing.status_code == 404, missing.text
    assert (await echo.http.post(run, json={"request_id": 5})).status_code == 400


async def test_a_key_makes_one_batch_and_another_account_sees_none(echo):
    run, headers = f"{ACCOUNT}/run/{echo.model}?queueRequest=true", {"Idempotency-Key": "k1"}
    body = {"requests": [{"prompt": "one"}]}
    first, again = [await echo.http.post(run, json=body, headers=headers) for _ in range(2)]
    assert first.json() == again.json() and again.headers["idempotent-replayed"] == "true"
    request_id = first.json()["result"]["request_id"]
    assert (await echo.http.post(run, json={**body, "x": 1}, headers=headers)).status_code == 422
    state = echo.gateway.state
    await asyncio.to_thread(state.admin.create, "other")
    _, key = await asyncio.to_thread(state.admin.keys.create, "other")
    await asyncio.to_thread(state._fill)
    theirs = {"Authorization": f"Bearer {key}"}
    other = f"/client/v4/accounts/other/ai/batches/{request_id}"
    assert (await echo.http.get(other, headers=theirs)).status_code == 404
    assert (await echo.http.post(f"{other}/cancel", headers=theirs)).status_code == 404
    assert (await echo.http.get(f"/v1/batches/batch_{request_id}", headers=theirs)).status_code == 404


async def test_nobody_claims_what_a_gateway_takes_in(echo, monkeypatch):
    """A runner that looks for inputs meanwhile, however late its gateway has cut them."""
    run, store, claimed = f"{ACCOUNT}/run/{echo.model}?queueRequest=true", echo.gateway.state.batches, []
    planned = store.planned

    def late(*args: Any) -> bool:
        claimed.append(store.claim_input("runner", time.time(), time.time() + 10.0))
        return planned(*args)

    monkeypatch.setattr(store, "planned", late)
    taken = await echo.http.post(run, json={"requests": [{"prompt": "one"}]})
    assert taken.status_code == 200 and claimed == [None]
    assert len(await requests(echo, taken.json()["result"]["request_id"])) == 1


@pytest.mark.parametrize("after", [False, True])
async def test_what_the_store_may_have_taken_keeps_its_bytes(echo, monkeypatch, after):
    """It stops answering while a batch is taken in: sent again under its key it is the same one, and can be run."""
    run, headers = f"{ACCOUNT}/run/{echo.model}?queueRequest=true", {"Idempotency-Key": "k1"}
    body, store = {"requests": [{"prompt": "one"}, {"prompt": "two"}]}, echo.gateway.state.batches
    planned = store.planned

    def lost(*args: Any) -> bool:
        if after:
            planned(*args)
        raise Away("the answer got lost")

    monkeypatch.setattr(store, "planned", lost)
    refused = await echo.http.post(run, json=body, headers=headers)
    assert refused.status_code == 503, refused.text
    monkeypatch.undo()
    request_id = (await echo.http.post(run, json=body, headers=headers)).json()["result"]["request_id"]
    found = await asyncio.to_thread(store.find, "local", request_id)
    assert orjson.loads(echo.gateway.state.files.get(found.input)) == {"requests": body["requests"]}
    assert len(await requests(echo, request_id)) == (2 if after else 0)


async def test_our_own_routes_list_cancel_and_follow(echo):
    run = f"{ACCOUNT}/run/{echo.model}?queueRequest=true"
    made = [
        (await echo.http.post(run, json={"requests": [{"prompt": f"w{i}"}]})).json()["result"]["request_id"]
        for i in range(3)
    ]
    page = (await echo.http.get(f"{ACCOUNT}/batches", params={"limit": 2})).json()
    assert [one["id"] for one in page["result"]] == made[:0:-1] and page["result_info"]["has_more"] is True
    rest = (await echo.http.get(f"{ACCOUNT}/batches", params={"after": made[1]})).json()
    assert [one["id"] for one in rest["result"]] == made[:1] and rest["result_info"]["has_more"] is False
    assert (await echo.http.post(f"{ACCOUNT}/batches/{made[0]}/retry")).status_code == 400
    one = (await echo.http.delete(f"{ACCOUNT}/batches/{made[0]}")).json()["result"]
    assert one["status"] == "cancelling"
    polled = await echo.http.post(run, json={"request_id": made[0]})
    assert polled.json()["result"]["status"] == "running"


# -- OpenAI


async def test_files_are_kept_listed_read_in_ranges_and_deleted(echo):
    rows = [chat(echo.model, i) for i in range(3)]
    data = b"\n".join(orjson.dumps(row) for row in rows)
    file = (await uploaded(echo.http, data)).json()
    assert file["object"] == "file" and file["bytes"] == len(data) and file["purpose"] == "batch"
    assert file["filename"] == "in.jsonl" and file["expires_at"] is None
    assert (await echo.http.get(f"/v1/files/{file['id']}")).json() == file
    content = f"/v1/files/{file['id']}/content"
    assert (await echo.http.get(content)).content == data
    part = await echo.http.get(content, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(data)}"
    assert (await echo.http.get(content, headers={"Range": f"bytes={len(data)}-"})).status_code == 416
    kept = (
        await uploaded(echo.http, data, data={"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    ).json()  # noqa: E501
    assert kept["expires_at"] == kept["created_at"] + 3600
    listed = (await echo.http.get("/v1/files", params={"limit": 1, "order": "asc", "purpose": "batch"})).json()
    assert [one["id"] for one in listed["data"]] == [file["id"]] and listed["has_more"] is True
    gone = await echo.http.delete(f"/v1/files/{file['id']}")
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert (await echo.http.get(content)).status_code == 404
    assert len(echo.gateway.state.files.list("files/")) == 1


async def test_uploads_that_are_wrong_leave_nothing_behind(echo):
    rows = [chat(echo.model, 0)]
    assert (await uploaded(echo.http, rows, data={"purpose": "fine-tune"})).status_code == 400
    assert (
        await echo.http.post("/v1/files", data={"purpose": "batch"}, files={"other": ("a", b"x")})
    ).status_code == 400
    assert (await echo.http.post("/v1/files", json={"purpose": "batch"})).status_code == 400
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc'
    assert (await echo.http.post("/v1/files", content=cut, headers=headers)).status_code == 400
    assert not echo.gateway.state.files.list("files/")


async def test_one_key_is_one_file_whatever_the_boundary(echo):
    headers = {"Idempotency-Key": "k"}
    first, again = [await uploaded(echo.http, b"abc\n", headers=headers) for _ in range(2)]
    assert first.json() == again.json() and again.headers["idempotent-replayed"] == "true"
    assert (await uploaded(echo.http, b"other\n", headers=headers)).status_code == 422
    assert len(echo.gateway.state.files.list("files/")) == 1


async def test_batches_of_openais_are_accepted(echo):
    file = (await uploaded(echo.http, [chat(echo.model, i) for i in range(5)])).json()["id"]
    answer = await created(echo.http, file, metadata={"a": "b"})
    batch = answer.json()
    assert answer.status_code == 200, answer.text
    assert batch["id"].startswith("batch_") and batch["status"] == "validating" and batch["model"] == echo.model
    assert batch["metadata"] == {"a": "b"} and batch["expires_at"] == batch["created_at"] + 86_400
    assert (await echo.http.get(f"/v1/batches/{batch['id']}")).json()["input_file_id"] == file
    page = (await echo.http.get("/v1/batches")).json()
    assert [one["id"] for one in page["data"]] == [batch["id"]] and page["has_more"] is False
    assert (await echo.http.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
    native = (await echo.http.get(f"{ACCOUNT}/batches/{batch['id']}")).json()["result"]
    assert (native["door"], native["name"], native["status"]) == ("openai", batch["id"], "cancelling")


async def test_what_is_wrong_at_the_beginning_of_a_file_is_refused_at_once(echo):
    cases: list[tuple[list[Any] | bytes, dict[str, Any], str]] = [
        ([chat(echo.model, 0), chat("@cf/no/such", 1)], {}, "request 2: No such model"),
        ([chat(echo.model, 0), chat(echo.model, 0)], {}, "request 2: custom_id"),
        ([chat(echo.model, 0)], {"endpoint": "/v1/embeddings"}, "request 1: url"),
        ([chat(echo.model, 0, n=1000)], {}, "request 1: "),
        (b"\n", {}, "no requests"),
        (b"{\n", {}, "request 1: it is not valid JSON"),
        ([chat(echo.model, 0)], {"endpoint": "/v1/nothing"}, "endpoint"),
        ([chat(echo.model, 0)], {"completion_window": "1h"}, "24h"),
        ([chat(echo.model, i) for i in range(2001)], {}, "at most 2000"),
    ]
    for rows, more, words in cases:
        file = (await uploaded(echo.http, rows)).json()["id"]
        refused = await created(echo.http, file, **more)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
    assert (await created(echo.http, "file-" + "0" * 32)).status_code == 404
    assert (await echo.http.get("/v1/batches")).json()["data"] == []


# -- Anthropic


def message(model: str, i: int, **more: Any) -> dict[str, Any]:
    return {"custom_id": f"r{i}", "params": {"model": model, "max_tokens": 9, "messages": TURN, **more}}


@pytest.fixture
def small(monkeypatch):
    """Bodies above 2 KB are large."""
    monkeypatch.setattr("serve_app.gateway.http.routes.deferred.anthropic_batches.INLINE_BYTES", 2000)


@pytest.mark.parametrize("count", [3, 300])
async def test_message_batches_small_and_large(echo, small, count):
    body = {"requests": [message(echo.model, i) for i in range(count)]}
    answer = await echo.http.post("/v1/messages/batches", json=body)
    batch = answer.json()
    assert answer.status_code == 200, answer.text
    assert batch["type"] == "message_batch" and batch["processing_status"] == "in_progress"
    assert batch["request_counts"]["processing"] == count and batch["results_url"] is None
    one = f"/v1/messages/batches/{batch['id']}"
    assert (await echo.http.get(one)).json()["id"] == batch["id"]
    assert (await echo.http.delete(one)).status_code == 400
    assert (await echo.http.post(f"{one}/cancel")).json()["processing_status"] == "canceling"
    page = (await echo.http.get("/v1/messages/batches", params={"limit": 1})).json()
    assert page["first_id"] == page["last_id"] == batch["id"] and page["has_more"] is False
    ids = [f"{ACCOUNT}/v1/messages/batches/{batch['id']}", f"/v1/messages/batches/msgbatch_{'0' * 32}"]
    assert [(await echo.http.get(path)).status_code for path in ids] == [200, 404]


@pytest.mark.parametrize("fill", [0, 300])
async def test_message_batches_that_are_wrong_are_refused_whole(echo, small, fill):
    good = [message(echo.model, i) for i in range(fill)]
    for wrong, words in (
        ([message(echo.model, 999), message(echo.model, 999)], "custom_id"),
        ([{**message(echo.model, 999), "custom_id": "a b"}], "custom_id"),
        ([{"custom_id": "x"}], "params"),
        ([7], ""),
    ):
        refused = await echo.http.post("/v1/messages/batches", json={"requests": [*good, *wrong]})
        assert refused.status_code == 400 and refused.json()["type"] == "error", refused.text
        assert words in refused.json()["error"]["message"]
    for body in (b'{"requests":[]}', b"{}", b"[", orjson.dumps({"requests": good})[:-2]):
        assert (await echo.http.post("/v1/messages/batches", content=body)).status_code == 400
    assert not echo.gateway.state.files.list("batches/")


@pytest.mark.parametrize("count", [3, 300])
async def test_one_key_is_one_message_batch(echo, small, count):
    body = {"requests": [message(echo.model, i) for i in range(count)]}
    headers = {"Idempotency-Key": "k"}
    made = [await echo.http.post("/v1/messages/batches", json=body, headers=headers) for _ in range(2)]
    assert made[0].json()["id"] == made[1].json()["id"]
    assert len([name for name in echo.gateway.state.files.list("batches/") if "input" in name]) == 1
    body["requests"].pop()
    assert (await echo.http.post("/v1/messages/batches", json=body, headers=headers)).status_code == 422


# -- what it would cost


async def test_a_batch_tells_what_it_would_cost_at_every_api(echo):
    """Eleven dollars a million tokens are a neuron a token; see `test_estimate.py` for what the backend foresees."""
    next(iter(echo.gateway.models)).ready = True
    single = {"requests": [{"messages": TURN}] * 3}
    file = (await uploaded(echo.http, [chat(echo.model, i, max_tokens=64) for i in range(3)])).json()["id"]
    openai = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
    anthropic = {"requests": [message(echo.model, i, max_tokens=64) for i in range(3)]}
    run = f"{ACCOUNT}/run/{echo.model}"
    answers = [
        (await echo.http.post(run, json={**single, "options": {"estimate": True}})).json()["result"],
        (await echo.http.post(f"{ACCOUNT}/estimate/{echo.model}", json=single)).json()["result"],
        (
            await echo.http.post(
                f"{ACCOUNT}/batches",
                params={"model": echo.model},
                content="\n".join(json.dumps(one) for one in single["requests"]),
                headers={"x-estimate": "true"},
            )
        ).json()["result"],
        (await echo.http.post("/v1/messages/batches", json=anthropic, headers={"x-estimate": "true"})).json(),
        (await echo.http.post("/v1/batches", json=openai, headers={"x-estimate": "true"})).json(),
    ]
    for told, words in zip(answers, (3, 3, 3, 3, 2), strict=True):
        assert told["object"] == "batch.estimate" and told["requests"] == told["estimated_from"] == 3, told
        expected = {"input_tokens": 3 * words, "cached_tokens": 3, "output_tokens": 9}
        assert told["units"]["expected"] == expected and told["units"]["most"]["output_tokens"] == 3 * 64
        assert told["neurons"]["expected"] == 3 * words + 9 and told["cost"]["currency"] == "USD"
        assert told["finish_s"]["most"] == 86_400
    assert not echo.settled and not echo.gateway.state.files.list("batches/")
    assert (await echo.http.get(f"{ACCOUNT}/batches")).json()["result"] == []


async def test_an_estimate_counts_what_requests_share_and_all_of_many(echo):
    next(iter(echo.gateway.models)).ready = True
    shared = " ".join(["word"] * 400)
    items = [
        {"messages": [{"role": "system", "content": shared}, {"role": "user", "content": f"w{i}"}]} for i in range(500)
    ]
    found = (await echo.http.post(f"{ACCOUNT}/estimate/{echo.model}", json={"requests": items})).json()["result"]
    assert found["requests"] == 500 and 100 <= found["estimated_from"] <= 200 and 0.4 < found["cached_share"] < 1
    assert found["units"]["expected"]["input_tokens"] == 500
    wrong = await echo.http.post(f"{ACCOUNT}/estimate/{echo.model}", json={"requests": [{"messages": TURN, "n": 1000}]})
    assert wrong.status_code == 400
