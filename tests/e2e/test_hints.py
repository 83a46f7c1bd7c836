"""A request's wish for a replica: followed where the replica is there, harmless where it is not."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
from ray import serve

from serve_app.app import model_application
from serve_app.catalog.load import load_catalog
from serve_app.channel.frames import TokenItem
from serve_app.channel.inbox import TokenInbox
from serve_app.config import load_settings
from tests.e2e.conftest import CHAT

NAME = "hinted-replicas"
# A handle lives in the event loop in which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def application(stack):
    """Two decode replicas and two prefill replicas of the chat model."""
    settings = load_settings({"SERVE_APP_HOME": str(stack.home)})
    catalog = load_catalog(settings.home)
    profile = catalog[CHAT].serving["local"]
    twice = {"min_replicas": 2, "max_replicas": 2}
    profile = profile.model_copy(
        update={
            "decode": profile.decode.model_copy(update=twice),
            "prefill": profile.prefill.model_copy(update=twice),
            "draft": None,
        }
    )
    built = model_application(catalog[CHAT], profile, settings, catalog.source(CHAT))
    serve.run_many([serve.RunTarget(target=built, name=NAME, route_prefix=None)])
    yield serve.get_deployment_handle("Decode", NAME), serve.get_deployment_handle("Prefill", NAME)
    serve.delete(NAME)


@pytest_asyncio.fixture(loop_scope="module")
async def inbox():
    inbox = TokenInbox()
    await inbox.start()
    yield inbox
    await inbox.aclose()


def wire(name: str, tokens: int = 40, **more) -> dict:
    ids = np.array([(sum(name.encode()) * 31 + i * 7) % 400 + 20 for i in range(tokens)], np.int32)
    return {
        "id": name,
        "ids": ids.tobytes(),
        "salt": name.encode(),
        "sampling": {"max_tokens": 3, "ignore_eos": True},
        **more,
    }


async def replicas(handle, inbox) -> list[str]:
    told = {"inbox": inbox.address.to_wire(), "lease_s": 30.0}
    return sorted(await handle.broadcast("subscribe", told).results_async())


async def made(handle) -> Counter:
    """Tokens and prompt tokens by process."""
    counters = await handle.broadcast("stats").results_async()
    return Counter({c["pid"]: c["generated_tokens"] + c["prompt_tokens"] for c in counters})


async def test_the_wished_decode_replica_is_taken(application, inbox):
    decode, _ = application
    names = await replicas(decode, inbox)
    assert len(set(names)) == 2
    for number, name in enumerate(names):
        before = await made(decode)
        for i in range(6):
            answer = await decode.generate.remote(wire(f"d{number}-{i}", replica=name, prefill=None))
            assert answer["finish"] == "length"
        assert len(await made(decode) - before) == 1


async def test_the_wished_prefill_replica_is_taken_by_way_of_decode(application, inbox):
    decode, prefill = application
    for number, name in enumerate(await replicas(prefill, inbox)):
        before = await made(prefill)
        for i in range(6):
            await decode.generate.remote(wire(f"p{number}-{i}", prefill={"stage": "prefill", "replica": name}))
        assert list((await made(prefill) - before).values()) == [6 * 39]


async def test_no_prefill_means_that_decode_computes_the_prompt(application, inbox):
    decode, prefill = application
    before = await made(prefill), await made(decode)
    answer = await decode.generate.remote(wire("own", tokens=900, prefill=None))
    assert answer["finish"] == "length" and answer["cached"] == 0
    assert not await made(prefill) - before[0]
    assert sum((await made(decode) - before[1]).values()) == 900 + 3


async def test_stages_are_preferences(application, inbox):
    """A prefill replica generates, with its prompt computed by itself or by a decode replica."""
    decode, prefill = application
    home = (await replicas(prefill, inbox))[0]
    helper = {"stage": "decode", "replica": (await replicas(decode, inbox))[0]}
    for number, where in enumerate((None, helper)):
        before = await made(prefill), await made(decode)
        answer = await prefill.generate.remote(wire(f"other{number}", tokens=300, replica=home, prefill=where))
        assert answer["finish"] == "length"
        assert sum((await made(prefill) - before[0]).values()) >= 3
        assert sum((await made(decode) - before[1]).values()) == (299 if where else 0)


async def test_a_prompt_may_come_to_be_computed_where_it_is_waited_for(application, inbox):
    """A wish for another replica of the same stage need not be followed."""
    decode, _ = application
    home = (await replicas(decode, inbox))[0]
    where = {"stage": "decode", "replica": home}
    call = decode.generate.remote(wire("itself", tokens=300, replica=home, prefill=where))
    answer = await asyncio.wait_for(call, 60)
    assert answer["finish"] == "length" and answer["replica"] == home and answer["cached"] == 0


async def test_a_grammar_holds_in_every_stage(application, inbox):
    """A request that is generated where it was prefilled is no less bound."""
    written = []
    for number, handle in enumerate(application):
        sampling = {"max_tokens": 20, "temperature": 0.0, "grammar": 'start: "yes" | "no"'}
        told = wire(f"grammar{number}", prefill=None, sampling=sampling, inbox=inbox.address.to_wire())
        ids = wire("the same prompt")["ids"]
        stream = inbox.open_stream(told["id"])
        answer = await handle.generate.remote({**told, "ids": ids})
        assert answer["finish"] == "stop"
        for item in answer["undelivered"]:
            stream.feed(TokenItem.from_wire(item))
        written.append([token for item in [i async for i in stream] for token in item.ids])
        stream.close()
    assert written[0] == written[1] and 1 <= len(written[0]) <= 5


async def test_a_wish_for_a_replica_that_is_not_there_changes_nothing(application):
    decode, _ = application
    for hint in ("gone", "", None, 7):
        elsewhere = {"stage": "prefill", "replica": "gone too"}
        answer = await decode.generate.remote(wire(f"gone-{hint}", replica=hint, prefill=elsewhere))
        assert answer["finish"] == "length"


async def test_every_worker_tells_every_gateway_of_its_load(application, inbox):
    decode, prefill = application
    told: dict[str, dict] = {}
    other = TokenInbox(on_load=lambda worker, report: told.setdefault("other", {}).update({worker: report}))
    inbox.on_load = lambda worker, report: told.setdefault("one", {}).update({worker: report})
    await other.start()
    names = set()
    for box in (inbox, other):
        names |= {*await replicas(decode, box), *await replicas(prefill, box)}
    for _ in range(200):
        if all(len(told.get(box, ())) == 4 for box in ("one", "other")):
            break
        await decode.generate.remote(wire("again", prefill=None))
    for reports in told.values():
        assert {r.replica for r in reports.values()} == names
        assert sorted(r.role for r in reports.values()) == ["decode", "decode", "prefill", "prefill"]
        assert all(r.total_blocks > 0 and r.max_seqs > 0 and r.model == CHAT for r in reports.values())
    await other.aclose()
