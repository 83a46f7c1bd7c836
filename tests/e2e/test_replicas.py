"""Two decode replicas behind one handle: what one request had computed, the next finds on either."""

from __future__ import annotations

import pytest
from ray import serve

from serve_app.api.types import ChoiceDone, GenerateRequest, TextDelta, Usage
from serve_app.app import model_application
from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.config import load_settings
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.sampling_params import SamplingParams
from serve_app.state.accounts import Caller
from serve_app.tasks.model import ServedModel
from serve_app.tasks.text_generation.run import generate
from serve_app.tasks.work import Runtime, Settlement
from serve_app.wire.generate import GenerateCall, GenerateResult
from serve_app.wire.methods import Method
from serve_app.wire.replicas import read_counters
from tests.e2e.conftest import CHAT

NAME = "two-decode-replicas"


@pytest.fixture(scope="module")
def handle(stack):
    settings = load_settings({"SERVE_APP_HOME": str(stack.home)})
    catalog = load_catalog(settings.home)
    record = catalog[CHAT]
    profile = record.serving["local"]
    twice = profile.decode.model_copy(update={"min_replicas": 2, "max_replicas": 2})
    profile = profile.model_copy(update={"decode": twice, "draft": None})
    application = model_application(record, profile, settings, catalog.source(CHAT))
    targets = [serve.RunTarget(target=application, name=NAME, route_prefix=None)]
    serve.run_many(targets)
    yield serve.get_deployment_handle("Decode", NAME), ServedModel(record, profile, catalog.source(CHAT), settings.home)
    serve.delete(NAME)


async def test_the_same_prompt_on_another_decode_replica_is_cached(handle):
    remote, model = handle
    inbox = TokenInbox()
    await inbox.start()

    async def call(_: ServedModel, method: Method, call: GenerateCall, stage: str, replica: str) -> GenerateResult:
        return method.result(await remote.generate.remote(call.encode()))

    engine = EngineBackend(inbox, call)
    runtime = Runtime(call, lambda m: engine, Settlement(), 100, salt=lambda account: b"another tenant")
    prompt = [{"role": "user", "content": "What does itertools.islice do, and what does it give back?"}]
    request = GenerateRequest(CHAT, prompt, None, False, SamplingParams(max_tokens=12, temperature=0))

    async def ask() -> tuple[str, Usage]:
        answered, _ = await generate(runtime, model, request, Caller(""))
        events = [e async for e in answered]
        assert isinstance(events[-1], Usage) and isinstance(events[-2], ChoiceDone)
        return "".join(e.text for e in events if isinstance(e, TextDelta)), events[-1]

    first, usage = await ask()
    assert usage.cached_tokens == 0  # another tenant's salt: the server's own requests do not count
    for _ in range(16):
        text, usage = await ask()
        assert text == first and usage.cached_tokens == usage.prompt_tokens - 1
    # Each of the two made some of the tokens: one replica's count is neither nothing nor everything.
    counters = read_counters(await remote.stats.remote()).numbers
    assert 12 <= counters["generated_tokens"] <= 17 * usage.completion_tokens - 12, counters
    await inbox.aclose()
