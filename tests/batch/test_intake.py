"""Input of each API becomes shards, results of what is wrong, or a refusal that names each bad line."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from serve_app.batch.apis import native_api
from serve_app.batch.intake import SHARD_REQUESTS, Intake, Refusal, ShardPlan
from serve_app.batch.prepare import Ended, prepare
from serve_app.state.blobs.files import DirectoryFiles
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch, Request, unpack
from tests.batch.world import CHAT, EMBED, known

ID = "ab" * 16
CHATS = "/v1/chat/completions"


def chat(i: int, *, system: str = "", **more: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": system}] if system else []
    body = {"model": CHAT, "messages": [*said, {"role": "user", "content": f"What is {i}?"}], **more}
    return {"custom_id": f"r{i}", "method": "POST", "url": CHATS, "body": body}


def written(rows: list[Any]) -> bytes:
    return b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows)


class Room:
    def __init__(self, home) -> None:
        self.home, self.files = home, DirectoryFiles(home / "files")

    def openai(self, data: bytes, most: int = 50_000, endpoint: str = CHATS, **more: Any) -> ShardPlan | Refusal:
        self.files.put("files/in", data)
        return self.prepare("openai", orjson.dumps({"endpoint": endpoint}), "files/in", most, **more)

    def prepare(self, door: str, about: bytes, name: str, most: int = 50_000, **more: Any) -> ShardPlan | Refusal:
        batch = Batch(ID, door, Caller("local"), 0.0, 9.0, 9.0, about=about, input=name)
        return prepare(self.files, batch, known(self.home, most), **more)

    def requests(self, plan: ShardPlan | Refusal) -> list[Request]:
        assert isinstance(plan, ShardPlan), plan
        found = [unpack(self.files.get(shard.blob)) for shard in plan.shards]
        assert [len(some) for some in found] == [shard.requests for shard in plan.shards]
        assert [shard.number for shard in plan.shards] == list(range(len(plan.shards)))
        return [request for some in found for request in some]


@pytest.fixture
def room(tmp_path) -> Room:
    return Room(tmp_path)


def problems(plan: ShardPlan | Refusal) -> list[tuple[str, int | None]]:
    assert isinstance(plan, Refusal), plan
    return [(told["code"], told["line"]) for told in orjson.loads(plan.problems)]


def test_requests_come_as_they_were_sent_in_shards_of_one_model_by_shared_prefix(room):
    systems = [f"You are number {i}. " * 30 for i in range(4)]
    rows = [chat(i, system=systems[i % 4]) for i in range(1400)]
    data = written(rows)
    plan = room.openai(data)
    found = room.requests(plan)
    assert {r.number: (r.id, r.url, orjson.loads(r.body)) for r in found} == {
        i: (row["custom_id"], CHATS, row["body"]) for i, row in enumerate(rows)
    }
    assert [r.number for r in found] == sorted(range(1400), key=lambda i: (i % 4, i))
    assert plan.total == 1400 and not plan.wrong and plan.shards[0].requests == SHARD_REQUESTS
    assert 0.4 < plan.shared_bytes / plan.prompt_bytes < 0.9


def test_models_have_shards_of_their_own_and_large_requests_make_small_ones(room):
    def embed(i: int, model: str, size: int = 10) -> dict[str, Any]:
        body = {"model": model, "input": f"{i} " + "x" * size}
        return {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": body}

    rows = [embed(i, (EMBED, EMBED.removeprefix("@cf/"))[i % 2], 400_000 if i < 6 else 10) for i in range(20)]
    plan = room.openai(written(rows), endpoint="/v1/embeddings")
    assert [r.number for r in room.requests(plan)] == list(range(20))
    assert {shard.model for shard in plan.shards} == {EMBED} and [s.requests for s in plan.shards] == [2, 2, 16]


def test_each_bad_line_is_named_with_its_reason(room):
    good = chat(0)
    rows: list[Any] = [
        good,
        b"{",
        {**chat(2), "custom_id": 3},
        {k: v for k, v in chat(3).items() if k != "body"},
        {**chat(4), "method": "GET"},
        {**chat(5), "url": "/v1/embeddings"},
        chat(6, model="@cf/no/such"),
        {**chat(7), "custom_id": "r0"},
        b"",
        {**chat(9), "custom_id": "a\0b"},
        b"[" * 20_000_000,
    ]
    assert problems(room.openai(written(rows))) == [
        ("invalid_json_line", 2),
        ("invalid_type", 3),
        ("missing_required_parameter", 4),
        ("invalid_method", 5),
        ("invalid_url", 6),
        ("model_not_found", 7),
        ("invalid_custom_id", 10),
        ("line_too_long", 11),
        ("duplicate_custom_id", 8),
    ]
    assert not room.files.list("batches/")


def test_what_is_wrong_inside_of_a_request_is_its_own_result(room):
    rows = [chat(0), chat(1, temperature=9), chat(2, stream=True), chat(3)]
    plan = room.openai(written(rows))
    assert [r.number for r in room.requests(plan)] == [0, 3] and plan.total == 4
    for _ in range(2):  # it can be read again
        assert [(w.number, w.id, w.outcome, w.status) for w in plan.wrong] == [
            (1, "r1", "failed", 400), (2, "r2", "failed", 400)
        ]  # fmt: skip
    assert orjson.loads(plan.wrong[0].body)["error"]["param"] == "temperature"
    assert len(plan.wrong) == 2 and plan.wrong[-2:] == [plan.wrong[0], plan.wrong[1]]


def test_a_file_that_is_all_wrong_empty_or_too_long_is_refused_whole(room):
    assert problems(room.openai(written([chat(0, temperature=9), chat(1, n=1000)]))) == [("5006", 1), ("5006", 2)]
    assert problems(room.openai(b"\n\n")) == [("empty_file", None)]
    assert problems(room.openai(written([chat(i) for i in range(4)]), most=3)) == [("5006", None)]
    told = problems(room.openai(b"x\n" * 5000))
    assert len(told) == 1001 and told[-1] == ("too_many_errors", None) and told[0] == ("invalid_json_line", 1)
    told = problems(room.openai(written([chat(i, n=1000) for i in range(1500)])))
    assert len(told) == 1001 and told[-1] == ("too_many_errors", None)
    assert not room.files.list("batches/")


def test_a_file_that_is_gone_or_a_batch_that_is_ended_is_left(room):
    about = orjson.dumps({"endpoint": CHATS})
    assert problems(room.prepare("openai", about, "files/gone")) == [("invalid_input_file", None)]
    assert problems(room.prepare("workers-ai", b"{}", "")) == [("server_error", None)]
    with pytest.raises(Ended):
        room.openai(written([chat(0)]), stop=lambda: True)


def test_a_large_array_of_anthropics(room):
    turn = [{"role": "user", "content": "What?"}]
    params = {"model": CHAT, "max_tokens": 5, "messages": turn}
    listed: list[dict[str, Any]] = [{"custom_id": f"r{i}", "params": params} for i in range(700)]
    listed[3]["params"] = {"model": CHAT, "messages": turn}
    room.files.put("batches/x/input.json", orjson.dumps({"requests": listed}))
    plan = room.prepare("anthropic", b"{}", "batches/x/input.json")
    assert [r.number for r in room.requests(plan)] == [i for i in range(700) if i != 3]
    (wrong,) = plan.wrong
    assert (wrong.number, wrong.id) == (3, "r3") and orjson.loads(wrong.body)["type"] == "error"
    room.files.put("batches/x/input.json", orjson.dumps({"requests": listed})[:-2])
    assert problems(room.prepare("anthropic", b"{}", "batches/x/input.json")) == [("5006", None)]


def test_native_items_lose_what_is_about_the_batch(room):
    intake = Intake(native_api("local", CHAT), known(room.home), Caller("local"), most=10)
    items: list[Any] = [{"prompt": "one", "external_reference": "a", "stream": True}, 7, {"prompt": "two"},
                        {"prompt": "x", "external_reference": 5}, {"max_tokens": 3}]  # fmt: skip
    for i, item in enumerate(items):
        intake.take(i, orjson.dumps(item))
    plan = intake.plan(room.files, ID)
    found = room.requests(plan)
    assert [(r.number, r.id, orjson.loads(r.body)) for r in found] == [
        (0, "a", {"prompt": "one"}), (2, None, {"prompt": "two"})
    ]  # fmt: skip
    assert found[0].url == f"/client/v4/accounts/local/ai/run/{CHAT}"
    assert isinstance(plan, ShardPlan) and [w.number for w in plan.wrong] == [1, 3, 4]
    assert all(orjson.loads(w.body)["errors"][0]["code"] == 5006 for w in plan.wrong)
