"""Two replicas of each stage behind one model: a request's wish for one of them is followed where it is there and
harmless where it is not, and what one has computed the next request finds on either.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace
from ray import serve

from deployments.model import model_application
from serve_app.api.types import ChoiceDone, GenerateRequest, TextDelta, Usage
from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.config import load_settings
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.text_generation import run
from serve_app.tasks.work import Runtime, Settlement
from serve_app.wire.generate import (
    HERE,
    GenerateCall,
    Generated,
    GenerateResult,
    PrefillAt,
    read_generate_result,
)
from serve_app.wire.methods import Method
from serve_app.wire.replicas import Subscribe, read_counters, read_subscribed
from tests.e2e.conftest import CHAT

NAME = "two-replicas"
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


def request(name: str, tokens: int = 40, **more) -> GenerateCall:
    ids = np.array([(sum(name.encode()) * 31 + i * 7) % 400 + 20 for i in range(tokens)], np.int32)
    return replace(
        GenerateCall(name, ids.tobytes(), name.encode(), SamplingParams(max_tokens=3, ignore_eos=True)), **more
    )


async def generate(handle, call: GenerateCall, replica: str = "") -> Generated:
    result = read_generate_result(await handle.generate.remote(call.encode(), replica=replica))
    assert isinstance(result, Generated), result
    return result


async def replicas(handle, inbox) -> list[str]:
    told = await handle.broadcast("subscribe", Subscribe(inbox.address, 30.0).encode()).results_async()
    return sorted(read_subscribed(one).replica for one in told)


async def made(handle) -> Counter:
    """Tokens and prompt tokens by process."""
    counters = [read_counters(told) for told in await handle.broadcast("stats").results_async()]
    return Counter({c.pid: c.numbers["generated_tokens"] + c.numbers["prompt_tokens"] for c in counters})


async def test_the_wished_decode_replica_is_taken(application, inbox):
    decode, _ = application
    names = await replicas(decode, inbox)
    assert len(set(names)) == 2
    for number, name in enumerate(names):
        before = await made(decode)
        for i in range(6):
            answer = await generate(decode, request(f"d{number}-{i}", prefill=HERE), name)
            assert answer.finish == "length"
        assert len(await made(decode) - before) == 1


async def test_the_wished_prefill_replica_is_taken_by_way_of_decode(application, inbox):
    decode, prefill = application
    for number, name in enumerate(await replicas(prefill, inbox)):
        before = await made(prefill)
        for i in range(6):
            await generate(decode, request(f"p{number}-{i}", prefill=PrefillAt("prefill", name)))
        assert list((await made(prefill) - before).values()) == [6 * 39]


async def test_no_prefill_means_that_decode_computes_the_prompt(application, inbox):
    decode, prefill = application
    before = await made(prefill), await made(decode)
    answer = await generate(decode, request("own", tokens=900, prefill=HERE))
    assert answer.finish == "length" and answer.cached == 0
    assert not await made(prefill) - before[0]
    assert sum((await made(decode) - before[1]).values()) == 900 + 3


async def test_stages_are_preferences(application, inbox):
    """A prefill replica generates, with its prompt computed by itself or by a decode replica."""
    decode, prefill = application
    home = (await replicas(prefill, inbox))[0]
    helper = PrefillAt("decode", (await replicas(decode, inbox))[0])
    for number, where in enumerate((HERE, helper)):
        before = await made(prefill), await made(decode)
        answer = await generate(prefill, request(f"other{number}", tokens=300, prefill=where), home)
        assert answer.finish == "length"
        assert sum((await made(prefill) - before[0]).values()) >= 3
        assert sum((await made(decode) - before[1]).values()) == (299 if where is helper else 0)


async def test_a_prompt_may_come_to_be_computed_where_it_is_waited_for(application, inbox):
    """A wish for another replica of the same stage need not be followed."""
    decode, _ = application
    home = (await replicas(decode, inbox))[0]
    call = generate(decode, request("itself", tokens=300, prefill=PrefillAt("decode", home)), home)
    answer = await asyncio.wait_for(call, 60)
    assert answer.finish == "length" and answer.replica == home and answer.cached == 0


async def test_a_grammar_holds_in_every_stage(application, inbox):
    """A request that is generated where it was prefilled is no less bound."""
    written = []
    for number, handle in enumerate(application):
        sampling = SamplingParams(max_tokens=20, temperature=0.0, grammar='start: "yes" | "no"')
        ids = request("the same prompt").ids
        call = request(f"grammar{number}", prefill=HERE, sampling=sampling, inbox=inbox.address, ids=ids)
        stream = inbox.open_stream(call.id)
        answer = await generate(handle, call)
        assert answer.finish == "stop"
        for item in answer.undelivered:
            stream.feed(item)
        written.append([token for item in [i async for i in stream] for token in item.ids])
        stream.close()
    assert written[0] == written[1] and 1 <= len(written[0]) <= 5


async def test_a_wish_for_a_replica_that_is_not_there_changes_nothing(application):
    decode, _ = application
    for hint in ("gone", "", None, 7):
        answer = await generate(decode, request(f"gone-{hint}", prefill=PrefillAt("prefill", "gone too")), hint)
        assert answer.finish == "length"


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
        await generate(decode, request("again", prefill=HERE))
    for reports in told.values():
        assert {r.replica for r in reports.values()} == names
        assert sorted(r.role for r in reports.values()) == ["decode", "decode", "prefill", "prefill"]
        assert all(r.total_blocks > 0 and r.max_seqs > 0 and r.model == CHAT for r in reports.values())
    await other.aclose()


@pytest.mark.slow
async def test_the_same_prompt_on_another_decode_replica_is_cached(application, inbox, stack):
    decode, _ = application
    catalog = load_catalog(stack.home)
    model = ServedModel(catalog[CHAT], catalog[CHAT].serving["local"], catalog.source(CHAT), stack.home)

    async def call(_: ServedModel, method: Method, call: GenerateCall, stage: str, replica: str) -> GenerateResult:
        return method.result(await decode.generate.remote(call.encode()))

    engine = EngineBackend(inbox, call)
    runtime = Runtime(call, lambda m: engine, Settlement(), 100, salt=lambda account: b"another tenant")
    prompt = [{"role": "user", "content": "What does itertools.islice do, and what does it give back?"}]
    asked = GenerateRequest(CHAT, prompt, None, False, SamplingParams(max_tokens=12, temperature=0))

    async def ask() -> tuple[str, Usage]:
        answered, _ = await run.generate(runtime, model, asked, Caller(""))
        events = [e async for e in answered]
        assert isinstance(events[-1], Usage) and isinstance(events[-2], ChoiceDone)
        return "".join(e.text for e in events if isinstance(e, TextDelta)), events[-1]

    before = await made(decode)
    first, usage = await ask()
    assert usage.cached_tokens == 0  # another tenant's salt: the server's own requests do not count
    for _ in range(16):
        text, usage = await ask()
        assert text == first and usage.cached_tokens == usage.prompt_tokens - 1
    # Each of the two made some of the tokens.
    assert len(await made(decode) - before) == 2
