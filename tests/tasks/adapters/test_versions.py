"""Versions, changes and deletion of fine-tunes, and who sees which."""

from __future__ import annotations

import time

from serve_app.api import identity
from serve_app.state.blobs.adapters import CONFIG, KEPT_S, WEIGHTS, blob
from tests.tasks.adapters.tuned import (
    GOOD_CONFIG,
    GOOD_WEIGHTS,
    TUNES,
    ask,
    code,
    created,
    other_weights,
    ready,
    sent,
)
from tests.tasks.conftest import ACCOUNT


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
