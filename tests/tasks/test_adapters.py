"""Fine-tunes from upload to request, in a gateway without workers: routes, who sees which, what a backend gets."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from cloudflare import AsyncCloudflare, NotFoundError

from serve_app.adapters import shapes
from serve_app.api import identity
from serve_app.api.types import ModelLimits
from serve_app.gateway.batches import Works
from serve_app.state.adapters import CONFIG, KEPT_S, WEIGHTS, blob, content_digest
from serve_app.state.batches import unpack
from serve_app.tasks.backend import Prepared
from tests.adapters import test_check as files
from tests.tasks.conftest import ACCOUNT, KEY, Served
from tests.tasks.test_backend import TURN, EchoBackend

QUEUED = {"queueRequest": "true"}
TUNES = f"{ACCOUNT}/finetunes"
GOOD_CONFIG, GOOD_WEIGHTS = json.dumps(files.CONFIG).encode(), files.packed(files.weights())


def other_weights() -> bytes:
    return files.packed({name: tensor * 2 for name, tensor in files.weights().items()})


class AdaptingBackend(EchoBackend):
    """Remembers the adapter of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[Any] = []

    def limits(self, model: Any) -> ModelLimits:
        return ModelLimits(default_max_tokens=64, lora=model.record.adapters is not None)

    async def prepare(self, model: Any, request: Any) -> Prepared:
        self.adapters.append(request.adapter)
        return await super().prepare(model, request)


@pytest.fixture
async def tuned(serve, record, tmp_path: Path):
    """A model that takes adapters, ``served.model``, and one that does not, both answered by an echo."""
    model = record("text-generation", "decode")
    folder = tmp_path / "models"
    plain = (folder / "text-generation.yaml").read_text()
    (folder / "plain.yaml").write_text(plain.replace(model, "@cf/test/plain"))
    (folder / "text-generation.yaml").write_text(plain + "lora: {price: {input: 22.0, output: 22.0}}\n")
    for name, text in (("config.json", "{}"), ("model.safetensors", "")):
        (folder / "weights" / name).write_text(text)
    base = {"linears": files.BASE.linears, "others": files.BASE.others, "kind": files.BASE.kind, "weights": {}}
    shapes.keep(base, folder / "weights", tmp_path)
    async with serve(models=(model, "@cf/test/plain"), lora_adapters=3, lora_file_bytes=100_000) as served:
        served.model, served.backend = model, AdaptingBackend()
        served.gateway.backends.update(dict.fromkeys((model, "@cf/test/plain"), served.backend))
        yield served
        served.gateway.adapters.close()


async def created(served: Served, name: str = "mine", **more: Any) -> httpx.Response:
    return await served.http.post(TUNES, json={"model": served.model, "name": name, **more})


async def sent(served: Served, which: str, name: str, data: bytes, **more: Any) -> httpx.Response:
    form = {"files": {"file": ("blob", data, "application/octet-stream")}, "data": {"file_name": name}, **more}
    return await served.http.post(f"{TUNES}/{which}/finetune-assets", **form)


async def ready(served: Served, name: str = "mine", weights: bytes = GOOD_WEIGHTS, **more: Any) -> dict[str, Any]:
    made = await created(served, name, **more)
    assert made.status_code == 200, made.text
    assert (await sent(served, name, CONFIG, GOOD_CONFIG)).status_code == 200
    done = await sent(served, name, WEIGHTS, weights)
    assert done.status_code == 200, done.text
    return done.json()["result"]


async def ask(served: Served, **more: Any) -> httpx.Response:
    return await served.http.post(f"{ACCOUNT}/run/{served.model}", json={"prompt": "one two", **more})


def code(response: httpx.Response) -> tuple[int, int]:
    return response.status_code, response.json()["errors"][0]["code"]


@pytest.fixture
async def others(tuned) -> httpx.AsyncClient:
    """The client of another account."""
    state = tuned.gateway.state
    key = await state.change(state.admin.add, "other")
    transport, headers = tuned.http._transport, {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers)


# -- upload


async def test_a_fine_tune_can_be_used_as_soon_as_its_files_are_there(tuned):
    made = (await created(tuned, description="of a test")).json()
    assert made["success"] and made["errors"] == []
    told = made["result"]
    assert {"id", "model", "name", "description", "public", "created_at", "modified_at"} <= told.keys()
    assert (told["status"], told["version"], told["public"]) == ("waiting", 0, False)
    assert told["upload"] == {"version": 1, "missing": [CONFIG, WEIGHTS], "problem": None}
    early = await ask(tuned, lora="mine")
    assert code(early) == (400, 3039) and CONFIG in early.text
    half = await sent(tuned, told["id"], CONFIG, GOOD_CONFIG)
    assert half.json()["result"]["upload"]["missing"] == [WEIGHTS]
    assert code(await ask(tuned, lora="mine")) == (400, 3039)
    done = (await sent(tuned, told["id"], WEIGHTS, GOOD_WEIGHTS)).json()
    assert done["success"]
    digest = content_digest(GOOD_CONFIG, len(GOOD_WEIGHTS))
    digest.update(GOOD_WEIGHTS)
    found = done["result"]
    assert (found["status"], found["version"], found["rank"], found["upload"]) == ("ready", 1, 4, None)
    assert (found["digest"], found["size"]) == (digest.hexdigest(), len(GOOD_CONFIG) + len(GOOD_WEIGHTS))
    for which in ("mine", told["id"]):
        answer = await ask(tuned, lora=which)
        assert answer.json()["result"]["response"] == "one two"
        used = tuned.backend.adapters[-1]
        assert (used.id, used.digest, used.size) == (told["id"], found["digest"], found["size"])
        assert tuned.settled[-1].entry.adapter == told["id"]
    assert (await ask(tuned)).status_code == 200
    assert tuned.backend.adapters[-1] is None and tuned.settled[-1].entry.adapter == ""
    stored = tuned.gateway.state.files
    assert stored.get(blob(found["digest"], CONFIG)) == GOOD_CONFIG
    assert stored.get(blob(found["digest"], WEIGHTS)) == GOOD_WEIGHTS


async def test_wranglers_create_and_upload_work_as_it_sends_them(tuned):
    """JSON labelled as text; a part that is called `blob`; the configuration first."""
    body = json.dumps({"model": tuned.model, "name": "mine", "description": ""})
    headers = {"Content-Type": "text/plain;charset=UTF-8", "User-Agent": "wrangler/4.164.0"}
    made = await tuned.http.post(TUNES, content=body, headers=headers)
    assert made.status_code == 200, made.text
    which = made.json()["result"]["id"]
    for name, data in ((CONFIG, GOOD_CONFIG), (WEIGHTS, GOOD_WEIGHTS)):
        boundary = "----formdata-undici-0123456789"
        part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
        form = f'{part}file_name"\r\n\r\n{name}\r\n{part}file"; filename="blob"\r\n'.encode()
        form += b"Content-Type: application/octet-stream\r\n\r\n" + data + f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        done = await tuned.http.post(f"{TUNES}/{which}/finetune-assets", content=form, headers=headers)
        assert done.status_code == 200 and done.json()["success"], done.text
    listed = (await tuned.http.get(TUNES)).json()["result"]
    assert [each["name"] for each in listed] == ["mine"] and listed[0]["status"] == "ready"


async def test_the_sdk_of_cloudflare_works_unmodified(tuned):
    client = AsyncCloudflare(api_token=KEY, base_url="http://here/client/v4", http_client=tuned.http)
    made = await client.ai.finetunes.create(account_id="local", model=tuned.model, name="mine", public=True)
    assert made.name == "mine" and made.public and made.created_at.year > 2000
    for name, data in ((CONFIG, GOOD_CONFIG), (WEIGHTS, GOOD_WEIGHTS)):
        done = await client.ai.finetunes.assets.create(made.id, account_id="local", file=data, file_name=name)
        assert done.success
    listed = await client.ai.finetunes.list(account_id="local")
    assert [each.id for each in listed or []] == [made.id]
    [public] = [each async for each in client.ai.finetunes.public.list(account_id="local", limit=10, offset=0)]
    assert public.id == made.id and public.modified_at >= made.created_at
    with pytest.raises(NotFoundError) as caught:
        await client.ai.finetunes.assets.create("nobody", account_id="local", file=b"{}", file_name=CONFIG)
    assert caught.value.errors[0].code == 3037


async def test_weights_may_come_first(tuned):
    await created(tuned)
    first = (await sent(tuned, "mine", WEIGHTS, GOOD_WEIGHTS)).json()["result"]
    assert first["upload"]["missing"] == [CONFIG] and first["status"] == "waiting"
    done = (await sent(tuned, "mine", CONFIG, GOOD_CONFIG)).json()["result"]
    assert (done["status"], done["version"]) == ("ready", 1)
    assert tuned.gateway.state.files.list("adapters/waiting-") == []
    assert (await ask(tuned, lora="mine")).status_code == 200


async def test_a_bad_file_is_refused_with_what_to_do_and_may_be_sent_again(tuned):
    await created(tuned)
    bad = await sent(tuned, "mine", CONFIG, json.dumps({**files.CONFIG, "use_dora": True}).encode())
    assert code(bad) == (400, 5006) and "use_dora" in bad.text
    await sent(tuned, "mine", CONFIG, GOOD_CONFIG)
    cut = await sent(tuned, "mine", WEIGHTS, GOOD_WEIGHTS[:-8])
    assert code(cut) == (400, 5006) and "is cut off" in cut.text
    told = (await tuned.http.get(f"{TUNES}/mine/status")).json()["result"]
    assert told["status"] == "refused" and "is cut off" in told["upload"]["problem"]
    assert code(await ask(tuned, lora="mine")) == (400, 3039)
    assert (await sent(tuned, "mine", WEIGHTS, GOOD_WEIGHTS)).json()["result"]["status"] == "ready"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("adapter_model.bin", b"PK", "safe_serialization"),
        ("README.md", b"#", "adapter_config.json or adapter_model.safetensors"),
        ("../adapter_config.json", b"{}", "file_name is"),
        (CONFIG, b"{", "no JSON"),
        (CONFIG, b'{"peft_type": "LORA", "r": 64}', "ranks up to 32"),
        (CONFIG, b'{"peft_type": "LORA", "model_type": "mistral"}', "model_type"),
        (CONFIG, b'{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B"}', "@cf/qwen/qwen3-8b"),
        (CONFIG, b" " * 70_000, "shorten|no JSON"),
        (WEIGHTS, bytes(100_001), "100000"),
    ],
)
async def test_files_that_are_none(tuned, name, data, says):
    await created(tuned)
    found = await sent(tuned, "mine", name, data)
    assert found.status_code in (400, 413)
    assert re.search(says, found.text), found.text
    assert (await tuned.http.get(f"{TUNES}/mine")).json()["result"]["status"] == "waiting"


async def test_forms_that_are_none(tuned):
    await created(tuned)
    where = f"{TUNES}/mine/finetune-assets"
    for form in (
        {"json": {"file_name": CONFIG}},
        {"files": {"other": ("x", b"1")}},
        {"files": [("file", ("a", b"1")), ("file", ("b", b"2"))]},
        {"content": b"--x", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}},
    ):
        assert (await tuned.http.post(where, **form)).status_code == 400
    # Where no field names the file, its own name does.
    named = await tuned.http.post(where, files={"file": (CONFIG, GOOD_CONFIG)})
    assert named.json()["result"]["upload"]["missing"] == [WEIGHTS]


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "@cf/x", ".hidden", "x" * 101, "ü", "0" * 32, "a@b", 7, None])
async def test_names_are_simple(tuned, name):
    made = await created(tuned, name)
    assert made.status_code == 400 and "name" in made.text
    assert (await tuned.http.get(TUNES)).json()["result"] == []


async def test_what_cannot_be_created(tuned):
    assert code(await tuned.http.post(TUNES, json={"model": "@cf/test/plain", "name": "mine"})) == (405, 5005)
    assert code(await tuned.http.post(TUNES, json={"model": "@cf/no/one", "name": "mine"})) == (400, 5007)
    assert (await tuned.http.post(TUNES, json={"name": "mine"})).status_code == 400
    assert (await created(tuned)).status_code == 200
    twice = await created(tuned)
    assert code(twice) == (409, 5006) and "/versions" in twice.text
    await created(tuned, "second")
    await created(tuned, "third")
    many = await created(tuned, "fourth")
    assert many.status_code == 400 and "Delete one" in many.text


# -- versions, changes, deletion


async def test_a_new_version_takes_the_place_of_the_old_one_when_it_is_whole(tuned):
    first = await ready(tuned)
    closed = await sent(tuned, "mine", WEIGHTS, other_weights())
    assert closed.status_code == 400 and "/versions" in closed.text
    opened = (await tuned.http.post(f"{TUNES}/mine/versions")).json()["result"]
    assert opened["status"] == "ready" and opened["upload"]["version"] == 2
    await sent(tuned, "mine", CONFIG, GOOD_CONFIG)
    assert (await sent(tuned, "mine", WEIGHTS, GOOD_WEIGHTS[:-8])).status_code == 400
    assert (await ask(tuned, lora="mine")).status_code == 200
    assert tuned.backend.adapters[-1].digest == first["digest"]
    second = (await sent(tuned, "mine", WEIGHTS, other_weights())).json()["result"]
    assert second["version"] == 2 and second["digest"] != first["digest"]
    await ask(tuned, lora="mine")
    assert tuned.backend.adapters[-1].digest == second["digest"]


async def test_a_request_that_is_run_again_goes_on_with_what_it_began_with(tuned):
    first = await ready(tuned)
    known = identity.Identity("0" * 32, 1.0)
    identity.current.set(known)
    model = tuned.gateway.models.find(tuned.model)
    caller = tuned.gateway.own()
    chosen = await tuned.gateway.adapters.choose(model, caller, "mine")
    await tuned.http.post(f"{TUNES}/mine/versions")
    await sent(tuned, "mine", CONFIG, GOOD_CONFIG)
    await sent(tuned, "mine", WEIGHTS, other_weights())
    identity.current.set(identity.Identity("0" * 32, 1.0, again=True, kept=known.kept))
    assert await tuned.gateway.adapters.choose(model, caller, "mine") == chosen
    assert chosen.digest == first["digest"]
    identity.current.set(None)
    assert (await tuned.gateway.adapters.choose(model, caller, "mine")).digest != first["digest"]


async def test_deleted_ones_are_gone_and_their_files_go_later(tuned):
    found = await ready(tuned)
    gone = await tuned.http.delete(f"{TUNES}/{found['id']}")
    assert gone.json()["success"]
    missing = await ask(tuned, lora="mine")
    assert code(missing) == (404, 3037) and "not found" in missing.text
    assert code(await tuned.http.delete(f"{TUNES}/mine")) == (404, 3037)
    assert (await tuned.http.get(TUNES)).json()["result"] == []
    state = tuned.gateway.state
    # Requests under way, and streams that come back, still find them.
    assert state.files.get(blob(found["digest"], WEIGHTS)) == GOOD_WEIGHTS
    state.adapters.store.sweep(time.time() + KEPT_S + 1, lambda digest: state.files.delete_below(f"adapters/{digest}"))
    assert state.files.list("adapters/") == []


async def test_what_is_told_of_one_can_be_changed_and_nothing_else(tuned):
    await ready(tuned)
    changed = await tuned.http.patch(f"{TUNES}/mine", json={"description": "new", "public": True})
    told = changed.json()["result"]
    assert (told["description"], told["public"], told["status"]) == ("new", True, "ready")
    assert (await tuned.http.patch(f"{TUNES}/mine", json={"model": "x"})).status_code == 400


async def test_files_can_be_fetched_again(tuned):
    await ready(tuned)
    for name, data in ((CONFIG, GOOD_CONFIG), (WEIGHTS, GOOD_WEIGHTS)):
        found = await tuned.http.get(f"{TUNES}/mine/finetune-assets/{name}")
        assert found.content == data and name in found.headers["content-disposition"]
    part = await tuned.http.get(f"{TUNES}/mine/finetune-assets/{WEIGHTS}", headers={"Range": "bytes=0-7"})
    assert part.status_code == 206 and part.content == GOOD_WEIGHTS[:8]
    assert (await tuned.http.get(f"{TUNES}/mine/finetune-assets/other")).status_code == 404
    await created(tuned, "empty")
    assert code(await tuned.http.get(f"{TUNES}/empty/finetune-assets/{CONFIG}")) == (400, 3039)


# -- whose


async def test_others_know_nothing_of_private_ones(tuned, others):
    mine = await ready(tuned)
    theirs = ACCOUNT.replace("local", "other")
    run = f"{theirs}/run/{tuned.model}"
    for which in ("mine", mine["id"]):
        assert code(await others.post(run, json={"prompt": "x", "lora": which})) == (404, 3037)
        assert code(await others.get(f"{theirs}/finetunes/{which}")) == (404, 3037)
        assert code(await others.delete(f"{theirs}/finetunes/{which}")) == (404, 3037)
    assert (await others.get(f"{theirs}/finetunes")).json()["result"] == []
    # The same name is another adapter there.
    made = await others.post(f"{theirs}/finetunes", json={"model": tuned.model, "name": "mine"})
    assert made.status_code == 200 and made.json()["result"]["id"] != mine["id"]
    for name, data in ((CONFIG, GOOD_CONFIG), (WEIGHTS, other_weights())):
        form = {"files": {"file": ("blob", data)}, "data": {"file_name": name}}
        done = await others.post(f"{theirs}/finetunes/mine/finetune-assets", **form)
        assert done.status_code == 200
    assert (await others.post(run, json={"prompt": "x", "lora": "mine"})).status_code == 200
    assert tuned.backend.adapters[-1].id == made.json()["result"]["id"]
    assert (await ask(tuned, lora="mine")).status_code == 200
    assert tuned.backend.adapters[-1].id == mine["id"]


async def test_public_ones_are_used_by_all_and_changed_by_their_owner(tuned, others):
    mine = await ready(tuned, public=True)
    theirs = ACCOUNT.replace("local", "other")
    listed = (await others.get(f"{theirs}/finetunes/public")).json()["result"]
    assert [each["id"] for each in listed] == [mine["id"]]
    assert (await others.post(f"{theirs}/run/{tuned.model}", json={"prompt": "x", "lora": "mine"})).status_code == 200
    assert tuned.backend.adapters[-1].id == mine["id"]
    assert (await others.get(f"{theirs}/finetunes/mine")).status_code == 200
    for response in (
        await others.delete(f"{theirs}/finetunes/{mine['id']}"),
        await others.patch(f"{theirs}/finetunes/{mine['id']}", json={"public": False}),
        await others.post(f"{theirs}/finetunes/{mine['id']}/versions"),
        await others.get(f"{theirs}/finetunes/{mine['id']}/finetune-assets/{WEIGHTS}"),
    ):
        assert code(response) == (404, 3037)
    bad = await others.get(f"{theirs}/finetunes/public", params={"orderBy": "digest"})
    assert bad.status_code == 400


# -- in every dialect


def dialects(model: str, lora: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Where the adapter is named by the field."""
    chat = {"model": model, "messages": TURN, "lora": lora}
    return {
        "native": (f"{ACCOUNT}/run/{model}", {"prompt": "one", "lora": lora}),
        "native raw": (f"{ACCOUNT}/run/{model}", {"prompt": "one", "raw": True, "lora": lora}),
        "native messages": (f"{ACCOUNT}/run/{model}", {"messages": TURN, "lora": lora}),
        "generic": (f"{ACCOUNT}/run", {"model": model, "input": {"prompt": "one", "lora": lora}}),
        "chat": ("/v1/chat/completions", chat),
        "stream": ("/v1/chat/completions", {**chat, "stream": True}),
        "completions": ("/v1/completions", {"model": model, "prompt": ["one", "two"], "lora": lora}),
        "responses": ("/v1/responses", {"model": model, "input": "one", "lora": lora}),
        "messages": ("/v1/messages", {**chat, "max_tokens": 8}),
        "ollama chat": ("/api/chat", chat),
        "ollama generate": ("/api/generate", {"model": model, "prompt": "one", "lora": lora}),
    }


@pytest.mark.parametrize("name", dialects("", ""))
async def test_every_dialect_knows_the_field_and_the_models_name(tuned, name):
    mine = await ready(tuned)
    plain, body = dialects(tuned.model, "")[name]
    without = {key: value for key, value in body.items() if key != "lora"}
    combined = f"{tuned.model}@mine"
    path, named = dialects(combined, "")[name]
    named = {key: value for key, value in named.items() if key != "lora"}
    for where, asked, expected in (
        (*dialects(tuned.model, "mine")[name], mine["id"]),
        (path, named, mine["id"]),
        (plain, without, None),
    ):
        answer = await tuned.http.post(where, json=asked)
        assert answer.status_code == 200, answer.text
        last = tuned.backend.adapters[-1]
        assert (None if last is None else last.id) == expected
    path, body = dialects(tuned.model, "nobody")[name]
    missing = await tuned.http.post(path, json=body)
    assert missing.status_code == 404 and "nobody" in missing.text
    path, body = dialects("@cf/test/plain", "mine")[name]
    refused = await tuned.http.post(path, json=body)
    assert refused.status_code == 405 and "LoRA" in refused.text
    path, body = dialects(f"{tuned.model}@mine", "another")[name]
    assert (await tuned.http.post(path, json=body)).status_code == 400


async def test_an_adapter_of_another_model_is_not_found(tuned):
    mine = await ready(tuned)
    table = tuned.gateway.state.adapters.store
    table.change("local", mine["id"], model="@cf/test/another")
    missing = await ask(tuned, lora="mine")
    assert code(missing) == (404, 3037) and "@cf/test/another" in missing.text


async def test_models_list_the_accounts_adapters_as_models(tuned, others):
    before = (await tuned.http.get("/v1/models")).json()["data"]
    await created(tuned, "waiting")
    await ready(tuned)
    name = f"{tuned.model}@mine"
    after = (await tuned.http.get("/v1/models")).json()["data"]
    assert {each["id"] for each in after} - {each["id"] for each in before} == {name}
    one = await tuned.http.get(f"/v1/models/{name}")
    assert one.json()["id"] == name and one.json()["object"] == "model"
    assert (await tuned.http.get(f"/v1/models/{tuned.model}@nobody")).status_code == 404
    assert name not in (await others.get("/v1/models")).text
    assert (await others.get(f"/v1/models/{name}")).status_code == 404


async def test_estimates_and_the_python_handle_know_adapters(tuned):
    mine = await ready(tuned)
    found = await tuned.http.post(f"{ACCOUNT}/estimate/{tuned.model}", json={"prompt": "one two", "lora": "mine"})
    assert found.status_code == 200 and tuned.backend.adapters[-1].id == mine["id"]
    missing = await tuned.http.post(f"{ACCOUNT}/estimate/{tuned.model}", json={"prompt": "one", "lora": "nobody"})
    assert missing.status_code == 404
    answer = await tuned.gateway.run_handle(tuned.model, {"prompt": "one two", "lora": "mine"})
    assert answer["result"]["response"] == "one two" and tuned.settled[-1].entry.adapter == mine["id"]
    answer = await tuned.gateway.run_handle(f"{tuned.model}@mine", {"prompt": "one two"})
    assert answer["success"] and tuned.backend.adapters[-1].id == mine["id"]
    answer = await tuned.gateway.run_handle(tuned.model, {"prompt": "one two", "lora": "nobody"})
    assert (answer["status"], answer["errors"][0]["code"]) == (404, 3037)


async def test_a_batch_takes_adapters(tuned):
    await ready(tuned)
    body = {"requests": [{"prompt": "one", "lora": "mine"}, {"prompt": "two"}]}
    batches = tuned.gateway.state.batches
    loras = []
    for model in (tuned.model, f"{tuned.model}@mine"):
        found = await tuned.http.post(f"{ACCOUNT}/run/{model}", params={"queueRequest": "true"}, json=body)
        assert found.status_code == 200, found.text
        for shard in batches.shards(found.json()["result"]["request_id"]):
            requests = unpack(tuned.gateway.state.files.get(shard.blob))
            loras += [json.loads(each.body).get("lora", "") for each in requests]
    assert sorted(loras) == ["", "mine", "mine", "mine"]


async def test_a_batch_goes_on_with_the_version_that_it_came_with_and_ends_without_it(tuned):
    first = await ready(tuned)
    model = tuned.gateway.models.find(tuned.model)
    model.ready = False  # nothing of a batch runs yet

    async def queued() -> str:
        body = {"requests": [{"prompt": "one", "lora": "mine"}, {"prompt": "two"}]}
        sent = await tuned.http.post(f"{ACCOUNT}/run/{tuned.model}", params=QUEUED, json=body)
        return sent.json()["result"]["request_id"]

    batches = [await queued()]
    await tuned.http.post(f"{TUNES}/mine/versions")
    await sent(tuned, "mine", CONFIG, GOOD_CONFIG)
    await sent(tuned, "mine", WEIGHTS, other_weights())
    batches.append(await queued())
    works = asyncio.ensure_future(Works(tuned.gateway).run())

    async def ended(batch: str) -> Any:
        while (found := (await tuned.http.get(f"{ACCOUNT}/batches/{batch}")).json()["result"])["ended_at"] is None:
            await asyncio.sleep(0.02)
        return found["requests"]

    try:
        model.ready = True
        async with asyncio.timeout(60):
            assert [(await ended(batch))["succeeded"] for batch in batches] == [2, 2]
        digests = [ref.digest for ref in tuned.backend.adapters if ref is not None]
        assert len(set(digests)) == len(digests) == 2 and first["digest"] in digests
        model.ready = False
        batches.append(await queued())
        await tuned.http.delete(f"{TUNES}/mine")
        model.ready = True
        async with asyncio.timeout(60):
            counts = await ended(batches[-1])
        assert (counts["succeeded"], counts["failed"]) == (1, 1)
        told = await tuned.http.post(f"{ACCOUNT}/run/{tuned.model}", json={"request_id": batches[-1]}, params=QUEUED)
        failed = [one for one in told.json()["result"]["responses"] if not one["success"]]
        assert [one["errors"][0]["code"] for one in failed] == [3037]
    finally:
        works.cancel()
        await asyncio.gather(works, return_exceptions=True)


async def test_a_batch_request_for_an_adapter_that_is_not_there_has_that_as_its_error(tuned):
    body = {"requests": [{"prompt": "one", "lora": "nobody"}, {"prompt": "two"}]}
    found = await tuned.http.post(f"{ACCOUNT}/run/{tuned.model}", params=QUEUED, json=body)
    batch = found.json()["result"]["request_id"]
    (result,) = tuned.gateway.state.batches.results(batch)
    assert (result.number, result.status) == (0, 404) and b"3037" in result.body


async def test_tokens_through_an_adapter_cost_what_the_record_says(tuned):
    await ready(tuned)
    plain = (await ask(tuned)).json()["result"]["usage"]
    with_adapter = (await ask(tuned, lora="mine")).json()["result"]["usage"]
    assert with_adapter["neurons"] == 2 * plain["neurons"] > 0
    estimate = f"{ACCOUNT}/estimate/{tuned.model}"
    told = [
        (await tuned.http.post(estimate, json={"prompt": "one two", **more})).json() for more in ({}, {"lora": "mine"})
    ]
    assert told[1]["result"]["neurons"]["most"] == 2 * told[0]["result"]["neurons"]["most"]
