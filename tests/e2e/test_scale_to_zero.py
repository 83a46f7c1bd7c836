"""A model without replicas: who can't wait is told when to come back, who can is served, and idle it goes again."""

from __future__ import annotations

from functools import partial

import pytest
from ray import serve

from deployments.calls import ask_all_replicas, call_application
from deployments.model import model_application
from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import GenerateRequest, TextDelta
from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.config import load_settings
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.gateway.dispatch.subscriptions import Subscriptions, Wake, Wanted
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel, application_name
from serve_app.tasks.text_generation.run import generate
from serve_app.tasks.work import Runtime, Settlement
from tests.e2e.conftest import CHAT
from tests.waiting import until

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What does itertools.islice do?"}]


@pytest.fixture(scope="module")
def model(stack):
    settings = load_settings({"SERVE_APP_HOME": str(stack.home)})
    catalog = load_catalog(settings.home)
    record = catalog[CHAT].model_copy(update={"id": "@cf/pico/sometimes", "draft": None})
    none = {"min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0, "downscale_delay_s": 2}
    profile = record.serving["local"]
    stages = {s: getattr(profile, s).model_copy(update=none) for s in ("decode", "prefill")}
    profile = profile.model_copy(update={**stages, "draft": None})
    name = application_name(record.id)
    built = model_application(record, profile, settings, catalog.source(CHAT))
    serve.run_many([serve.RunTarget(target=built, name=name, route_prefix=None)])
    found = ServedModel(record, profile, catalog.source(CHAT), settings.home, ready=True)
    yield found
    serve.delete(name)


def replicas(model: ServedModel) -> int:
    deployments = serve.status().applications[application_name(model.id)].deployments
    return sum(sum(d.replica_states.values()) for d in deployments.values())


async def test_from_zero_and_back(model, run):
    assert replicas(model) == 0
    inbox = TokenInbox()
    await inbox.start()
    engine = EngineBackend(inbox, call_application)
    runtime = Runtime(
        call_application, lambda m: engine, Settlement(), 100, salt=lambda account: b"a tenant of its own"
    )
    dispatcher = engine.dispatcher(model)

    def told(process, report) -> None:
        if report is None:
            dispatcher.lost(process)
        else:
            dispatcher.report(process, report)

    inbox.on_load = told
    wake = Wake(call_application)
    dispatcher.start_worker = partial(wake.first, model)
    subscriptions = Subscriptions([model], inbox, ask_all_replicas, lambda m: Wanted(dispatcher.needed()))
    subscriptions.start()

    async def ask(**asked) -> str:
        request = GenerateRequest(CHAT, QUESTION, None, False, SamplingParams(max_tokens=24, temperature=0), **asked)
        events, _ = await generate(runtime, model, request, Caller(""))
        return "".join([e.text async for e in events if isinstance(e, TextDelta)])

    with pytest.raises(OutOfCapacity) as refused:
        await ask(deadline_s=0.5)
    assert refused.value.retry_after >= 1
    expected = run(CHAT, {"messages": QUESTION, "max_tokens": 24, "temperature": 0})["response"]
    assert await ask() == expected
    # By now it reports, and requests are sent where the gateway wants them.
    await until(lambda: dispatcher.policy.workers.loads)
    placed = dispatcher.policy.counters.placed
    assert await ask() == expected and dispatcher.policy.counters.placed == placed + 1
    # Nobody asks any more: what the planner needs decays, and the replicas go.
    dispatcher.policy.workers.demand.tau = 1.0
    await until(lambda: replicas(model) == 0, 90)
    # The workers' processes end a moment after their replicas.
    await until(lambda: not dispatcher.policy.workers.loads)
    assert await ask() == expected
    subscriptions._task.cancel()
    await inbox.aclose()
