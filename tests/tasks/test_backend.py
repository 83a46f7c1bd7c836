"""A model that is neither weights nor workers: a backend of another kind, reached in every dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import ChoiceDone, Event, GenerateRequest, ModelLimits, TextDelta, Usage
from serve_app.tasks.backend import Prepared
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Work
from tests.tasks.conftest import ACCOUNT


class EchoBackend:
    """Says the last message again, word by word. Counts words, having no tokenizer."""

    def __init__(self) -> None:
        self.closed = 0

    def limits(self, model: ServedModel) -> ModelLimits:
        return ModelLimits(default_max_tokens=64)

    async def prepare(self, model: ServedModel, request: GenerateRequest) -> Prepared:
        words = str((request.messages or [{"content": request.prompt}])[-1]["content"]).split()
        return Prepared(request, len(words), words)

    async def events(self, prepared: Prepared, work: Work) -> AsyncIterator[Event]:
        work.usage = Usage(prompt_tokens=len(prepared.prompt), cached_tokens=1)
        if "busy" in prepared.prompt:
            raise OutOfCapacity(retry_after=7.0)
        work.placed = True
        try:
            for index in range(prepared.request.n):
                for number, word in enumerate(prepared.prompt):
                    if word == "break":
                        raise RuntimeError("the provider broke")
                    work.usage.completion_tokens += 1
                    yield TextDelta(index, f" {word}" if number else word)
                yield ChoiceDone(index, "stop")
        finally:
            self.closed += 1

    async def count_tokens(self, model: ServedModel, request: GenerateRequest) -> int:
        return (await self.prepare(model, request)).prompt_tokens

    def waiting(self, model: ServedModel) -> str:
        return ""


WORDS = "one two three"
TURN = [{"role": "user", "content": WORDS}]


def frames(body: str) -> list[dict[str, Any]]:
    found = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [orjson.loads(frame) for frame in found if frame != "[DONE]"]


@pytest.fixture
async def elsewhere(serve, record):
    """A model of the catalogue whose weights folder is empty and that has no worker."""
    model = record("text-generation", "decode")
    async with serve(models=(model,)) as served:
        served.model = model
        served.backend = served.gateway.backends[model] = EchoBackend()
        yield served


async def test_native(elsewhere) -> None:
    run = f"{ACCOUNT}/run/{elsewhere.model}"
    whole = (await elsewhere.http.post(run, json={"messages": TURN})).json()["result"]
    assert whole["response"] == WORDS and whole["usage"]["completion_tokens"] == 3
    streamed = frames((await elsewhere.http.post(run, json={"prompt": WORDS, "stream": True})).text)
    assert "".join(frame["response"] for frame in streamed) == WORDS
    assert streamed[-1]["usage"] == whole["usage"]
    # The Python handle goes the same way.
    assert (await elsewhere.gateway.run_handle(elsewhere.model, {"prompt": WORDS}))["result"]["response"] == WORDS
    told = [frame async for frame in elsewhere.gateway.stream_handle(elsewhere.model, {"prompt": WORDS})]
    assert "".join(frame["response"] for frame in told) == WORDS
    assert elsewhere.endings == [("text-generation", "done")] * 4 and elsewhere.backend.closed == 4


async def test_openai(elsewhere) -> None:
    ask = {"model": elsewhere.model, "messages": TURN, "n": 2}
    whole = (await elsewhere.http.post("/v1/chat/completions", json=ask)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [WORDS, WORDS]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    ask |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = frames((await elsewhere.http.post("/v1/chat/completions", json=ask)).text)
    said = ["".join(c["delta"].get("content", "") for f in streamed for c in f["choices"] if c["index"] == i)
            for i in (0, 1)]  # fmt: skip
    assert said == [WORDS, WORDS] and streamed[-1]["usage"] == whole["usage"]
    answer = await elsewhere.http.post("/v1/responses", json={"model": elsewhere.model, "input": WORDS})
    assert answer.json()["output"][0]["content"][0]["text"] == WORDS
    assert elsewhere.endings == [("text-generation", "done")] * 3


async def test_anthropic(elsewhere) -> None:
    ask = {"model": elsewhere.model, "messages": TURN, "max_tokens": 9}
    whole = (await elsewhere.http.post("/v1/messages", json=ask)).json()
    assert whole["content"][0]["text"] == WORDS and whole["usage"]["cache_read_input_tokens"] == 1
    streamed = frames((await elsewhere.http.post("/v1/messages", json={**ask, "stream": True})).text)
    assert "".join(f["delta"].get("text", "") for f in streamed if f["type"] == "content_block_delta") == WORDS
    count = await elsewhere.http.post("/v1/messages/count_tokens", json=ask)
    assert count.json() == {"input_tokens": 3}
    assert elsewhere.endings == [("text-generation", "done")] * 2
