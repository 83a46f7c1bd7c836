"""Whole lives of batches on the running stack, through the unmodified SDKs at each of the four APIs."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic
from cloudflare import Cloudflare
from openai import OpenAI

from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT

TURN = [{"role": "user", "content": "What does math.sqrt do?"}]
# Far more than is run before it is cancelled.
MANY = 1000


def until(ask: Callable[[], Any], over: Callable[[Any], bool]) -> Any:
    limit = time.monotonic() + 120
    while not over(found := ask()):
        assert time.monotonic() < limit, found
        time.sleep(0.05)
    return found


def test_openais(stack, http):
    client = OpenAI(api_key=stack.key, base_url=f"{stack.url}/v1", max_retries=0)

    def sent(count: int, **more: Any) -> tuple[Any, Any]:
        row = {"method": "POST", "url": "/v1/chat/completions", "body": {"model": CHAT, "messages": TURN, **more}}
        lines = [json.dumps({"custom_id": f"r{n}", **row}) for n in range(count)]
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return file, client.batches.create(**asked, metadata={"of": "test"})

    file, batch = sent(3, temperature=0)
    batch = until(lambda: client.batches.retrieve(batch.id), lambda b: b.completed_at is not None)
    assert batch.status == "completed" and batch.metadata == {"of": "test"} and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed) == (3, 3)
    output = client.files.content(batch.output_file_id).text.splitlines()
    alone = client.chat.completions.create(model=CHAT, messages=TURN, temperature=0).choices[0].message.content
    texts = {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in map(json.loads, output)
    }
    assert texts == dict.fromkeys(("r0", "r1", "r2"), alone)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert {file.id, batch.output_file_id} <= {one.id for one in client.files.list()}

    second, long = sent(MANY)
    assert client.batches.cancel(long.id).status in ("cancelling", "cancelled")
    long = until(lambda: client.batches.retrieve(long.id), lambda b: b.cancelled_at is not None)
    rows = [json.loads(line) for line in client.files.content(long.error_file_id).text.splitlines()]
    assert rows and {row["error"]["code"] for row in rows} == {"batch_cancelled"}
    assert len(rows) + long.request_counts.completed == MANY == long.request_counts.total

    for gone in (file.id, second.id, batch.output_file_id, long.error_file_id):
        assert client.files.delete(gone).deleted
    assert batch.output_file_id not in {one.id for one in client.files.list()}
    # A batch of theirs is never deleted by their library; by us it is.
    for one in (batch.id, long.id):
        assert http.delete(f"{stack.api}/batches/{one}").status_code == 200
    assert not {batch.id, long.id} & {one.id for one in client.batches.list()}


def test_anthropics(stack):
    client = Anthropic(api_key=stack.key, base_url=stack.url, max_retries=0)
    batches = client.messages.batches

    def sent(count: int, **more: Any) -> Any:
        params = {"model": CHAT, "max_tokens": 20, "messages": TURN, **more}
        return batches.create(requests=[{"custom_id": f"r{n}", "params": params} for n in range(count)])

    batch = sent(3, temperature=0)
    assert batch.processing_status == "in_progress" and batch.results_url is None
    batch = until(lambda: batches.retrieve(batch.id), lambda b: b.processing_status == "ended")
    assert batch.request_counts.succeeded == 3 and batch.results_url
    asked = {"model": CHAT, "max_tokens": 20, "messages": TURN}
    alone = client.messages.create(**asked, extra_body={"temperature": 0}).content[0].text
    found = {one.custom_id: one.result.message.content[0].text for one in batches.results(batch.id)}
    assert found == dict.fromkeys(("r0", "r1", "r2"), alone)

    long = sent(MANY)
    assert batches.cancel(long.id).processing_status in ("canceling", "ended")
    long = until(lambda: batches.retrieve(long.id), lambda b: b.processing_status == "ended")
    types = [one.result.type for one in batches.results(long.id)]
    assert types.count("canceled") == long.request_counts.canceled > 0 and len(types) == MANY
    assert [one.id for one in batches.list(limit=2)][:2] == [long.id, batch.id]
    for one in (long, batch):
        assert batches.delete(one.id).type == "message_batch_deleted"
    assert not {long.id, batch.id} & {one.id for one in batches.list()}


def test_workers_ais(stack):
    client = Cloudflare(api_token=stack.key, base_url=f"{stack.url}/client/v4", max_retries=0)
    ours = f"/accounts/{ACCOUNT}/ai/batches"

    def run(body: dict[str, Any]) -> Any:
        queue = {"account_id": ACCOUNT, "text": "", "extra_query": {"queueRequest": "true"}}
        return client.ai.run(CHAT, **queue, extra_body=body)

    def listed() -> set[str]:
        return {one["id"] for one in client.get(ours, cast_to=object)["result"]}

    asked = {"prompt": TURN[0]["content"], "temperature": 0}
    queued = run({"requests": [{**asked, "external_reference": f"row-{n}"} for n in range(3)]})
    assert queued["status"] == "queued" and queued["model"] == CHAT
    done = until(lambda: run({"request_id": queued["request_id"]}), lambda told: "responses" in told)
    alone = client.ai.run(CHAT, account_id=ACCOUNT, **asked)["response"]
    told = {one["external_reference"]: one["result"]["response"] for one in done["responses"]}
    assert told == dict.fromkeys(("row-0", "row-1", "row-2"), alone)

    long = run({"requests": [asked] * MANY})["request_id"]
    assert {queued["request_id"], long} <= listed()
    assert client.post(f"{ours}/{long}/cancel", cast_to=object)["result"]["status"] in ("cancelling", "cancelled")
    ended = until(lambda: client.get(f"{ours}/{long}", cast_to=object)["result"], lambda b: b["ended_at"] is not None)
    assert ended["status"] == "cancelled" and ended["requests"]["cancelled"] > 0 == ended["requests"]["waiting"]
    for one in (queued["request_id"], long):
        client.delete(f"{ours}/{one}", cast_to=object)
    assert not {queued["request_id"], long} & listed()


@pytest.mark.parametrize("wrong", [False, True])
def test_queues(stack, wrong):
    client = Cloudflare(api_token=stack.key, base_url=f"{stack.url}/client/v4", max_retries=0)
    queues, here = client.queues, {"account_id": ACCOUNT}
    names = [f"{name}-{int(wrong)}" for name in ("sdk-asks", "sdk-answers", "sdk-dead")]
    asks, answers, dead = (queues.create(**here, queue_name=name).queue_id for name in names)
    bound = {"model": CHAT, "results_queue": names[1], "dead_letter_queue": names[2]}
    consumer = queues.consumers.create(asks, **here, type="workers_ai", extra_body=bound)
    body = {"prompt": TURN[0]["content"], "temperature": 9 if wrong else 0, "external_reference": "row"}
    queues.messages.push(asks, **here, body=body, content_type="json")

    def pull(queue: str) -> Any:
        return queues.messages.pull(queue, **here, batch_size=10, visibility_timeout_ms=60_000).messages

    (found,) = until(lambda: pull(answers), bool)
    told = json.loads(base64.b64decode(found.body))
    assert told["external_reference"] == "row" and told["success"] is not wrong
    if wrong:
        assert told["errors"][0]["code"] == 5006 and len(pull(dead)) == 1
    else:
        alone = client.ai.run(CHAT, **here, prompt=body["prompt"], temperature=0)["response"]
        assert told["result"]["response"] == alone
    # Once more after a retry, and never after an ack.
    queues.messages.ack(answers, **here, retries=[{"lease_id": found.lease_id, "delay_seconds": 0}])
    (again,) = until(lambda: pull(answers), bool)
    assert (again.id, again.attempts) == (found.id, found.attempts + 1)
    queues.messages.ack(answers, **here, acks=[{"lease_id": again.lease_id}])
    assert not pull(answers)
    assert {asks, answers, dead} <= {one.queue_id for one in queues.list(**here)}
    queues.consumers.delete(consumer.consumer_id, **here, queue_id=asks)
    for queue in (asks, answers, dead):
        queues.delete(queue, **here)
    assert not {asks, answers, dead} & {one.queue_id for one in queues.list(**here)}
