"""A gateway that workers can't reach still streams: it asks for the tokens."""

from __future__ import annotations

import socket

from ray import serve

from serve_app.api.types import ChoiceDone, GenerateRequest, TextDelta, Usage
from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.gateway.backends import attempts
from serve_app.gateway.backends.engine import EngineBackend
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.model import ServedModel, application_name
from serve_app.tasks.text_generation.run import generate
from serve_app.tasks.work import Runtime, Settlement
from serve_app.wire.address import InboxAddress
from serve_app.wire.generate import CollectCall, Collected, GenerateCall, GenerateResult
from serve_app.wire.methods import Method
from tests.e2e.conftest import CHAT, eos_id

TOKENS = 150


class Unreachable(TokenInbox):
    """Listens, but sends workers to a port where nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = socket.socket()
        self.closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused

    @property
    def address(self) -> InboxAddress:
        real = super().address
        return InboxAddress(real.host, self.closed.getsockname()[1], real.secret)


async def test_tokens_come_by_calls_while_the_request_runs(stack, monkeypatch):
    monkeypatch.setattr(attempts, "CHANNEL_PATIENCE_S", 0.05)
    catalog = load_catalog(stack.home)
    record = catalog[CHAT]
    model = ServedModel(record, record.serving["local"], catalog.source(CHAT), stack.home)
    handle = serve.get_deployment_handle("Decode", application_name(CHAT))
    ended: dict[bytes, bool] = {}

    async def call(_: ServedModel, method: Method, call: GenerateCall, stage: str, replica: str) -> GenerateResult:
        result = method.result(await handle.generate.remote(call.encode()))
        ended[call.salt] = True
        return result

    async def collect(_: ServedModel, method: Method, call: CollectCall, stage: str) -> list[Collected]:
        return [method.result(told) for told in await handle.broadcast("collect", call.encode()).results_async()]

    # Hot, so that nothing can be guessed ahead and the request takes its time; the seed makes it repeatable.
    sampling = SamplingParams(max_tokens=TOKENS, temperature=2.0, seed=7, logit_bias={int(eos_id()): -100.0})
    request = GenerateRequest(CHAT, None, "def by_calls(tokens):", True, sampling)

    async def ask(inbox: TokenInbox, salt: bytes) -> tuple[str, Usage, int]:
        await inbox.start()
        backend = EngineBackend(inbox, call, collect)
        runtime = Runtime(call, lambda m: backend, Settlement(), 100, salt=lambda account: salt)
        events, _ = await generate(runtime, model, request, Caller(""))
        text, usage, early = "", None, 0
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
                early += salt not in ended
            elif not isinstance(event, ChoiceDone):
                usage = event
        await inbox.aclose()
        return text, usage, early

    text, usage, _ = await ask(TokenInbox(), b"a tenant")
    asked, asked_usage, early = await ask(Unreachable(), b"another tenant")
    assert asked == text and asked_usage.completion_tokens == usage.completion_tokens == TOKENS
    # It did not wait for the end: several pieces came before.
    assert early >= 2
