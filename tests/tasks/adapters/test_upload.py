"""Fine-tunes from upload to request, in a gateway without workers."""

from __future__ import annotations

import json
import re

import pytest
from cloudflare import AsyncCloudflare, NotFoundError

from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, blob, content_digest
from tests.adapters import test_check as files
from tests.tasks.adapters.tuned import (
    GOOD_CONFIG,
    GOOD_WEIGHTS,
    TUNES,
    ask,
    code,
    created,
    sent,
)
from tests.tasks.conftest import KEY


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
