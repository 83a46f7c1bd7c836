"""A model that is neither weights nor workers: a backend of another kind, reached in every dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from openai.types.responses import CompactedResponse

from serve_app.api.errors import OutOfCapacity
from serve_app.api.fields.content import TEXT_ONLY, PartKind, content_text
from serve_app.api.types import ChoiceDone, Event, GenerateRequest, ModelLimits, TextDelta, Usage
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.backend import Prepared
from serve_app.tasks.estimate import Foreseen
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Work
from tests.tasks.conftest import ACCOUNT


class EchoBackend:
    """Says the last message again, word by word. Counts words, having no tokenizer."""

    def __init__(self, takes: frozenset[PartKind] = TEXT_ONLY) -> None:
        self.closed = 0
        self.takes = takes
        self.seen: list[dict[str, Any]] = []

    def limits(self, model: ServedModel) -> ModelLimits:
        return ModelLimits(default_max_tokens=64, takes=self.takes)

    async def prepare(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> Prepared:
        content = (request.messages or [{"content": request.prompt}])[-1]["content"]
        if not isinstance(content, str):
            self.seen += content
            content = content_text([part for part in content if part["type"] == "text"])
        words = content.split()
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

    async def foresee(self, model: ServedModel, prepared: Prepared, caller: Caller, salt: bytes) -> Foreseen:
        return Foreseen(cached_tokens=1, output_tokens=3, wait_s=0.5, ttft_s=0.75)

    async def count_tokens(self, model: ServedModel, request: GenerateRequest, salt: bytes) -> int:
        return (await self.prepare(model, request, salt)).prompt_tokens

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


async def test_compaction(elsewhere) -> None:
    """What users said stays, and the summary stands for the rest where it is sent back."""
    ask = {
        "model": elsewhere.model,
        "input": [*TURN, {"role": "assistant", "content": "four"}],
        "instructions": "Brief.",
    }
    answer = await elsewhere.http.post("/v1/responses/compact", json=ask)
    assert answer.status_code == 200, answer.text
    # The SDK's type knows no users' messages, which its own words promise.
    short = {**answer.json(), "output": answer.json()["output"][-1:]}
    found = CompactedResponse.model_validate(short, strict=True)
    assert [item["type"] for item in answer.json()["output"]] == ["message", "compaction"]
    assert answer.json()["output"][0]["content"] == [{"type": "input_text", "text": WORDS}]
    assert found.object == "response.compaction" and found.usage.output_tokens > 0
    more = [*answer.json()["output"], {"role": "user", "content": "go on"}]
    followed = await elsewhere.http.post("/v1/responses", json={"model": elsewhere.model, "input": more})
    assert followed.status_code == 200 and followed.json()["output"][0]["content"][0]["text"] == "go on"
    first = (await elsewhere.http.post("/v1/responses", json={"model": elsewhere.model, "input": WORDS})).json()
    named = {"model": elsewhere.model, "previous_response_id": first["id"]}
    short = (await elsewhere.http.post("/v1/responses/compact", json=named)).json()
    assert short["output"][0]["content"][0]["text"] == WORDS
    for wrong in ({"model": elsewhere.model}, {"model": elsewhere.model, "input": []}):
        assert (await elsewhere.http.post("/v1/responses/compact", json=wrong)).status_code == 400
    broken = [{"type": "compaction", "encrypted_content": "x"}]
    refused = await elsewhere.http.post("/v1/responses", json={"model": elsewhere.model, "input": broken})
    assert refused.status_code == 400 and "not of this server" in refused.text


async def test_anthropic(elsewhere) -> None:
    ask = {"model": elsewhere.model, "messages": TURN, "max_tokens": 9}
    whole = (await elsewhere.http.post("/v1/messages", json=ask)).json()
    assert whole["content"][0]["text"] == WORDS and whole["usage"]["cache_read_input_tokens"] == 1
    streamed = frames((await elsewhere.http.post("/v1/messages", json={**ask, "stream": True})).text)
    assert "".join(f["delta"].get("text", "") for f in streamed if f["type"] == "content_block_delta") == WORDS
    count = await elsewhere.http.post("/v1/messages/count_tokens", json=ask)
    assert count.json() == {"input_tokens": 3}
    assert elsewhere.endings == [("text-generation", "done")] * 2


PNG = "data:image/png;base64,AAAA"
IMAGES: dict[str, dict[str, Any]] = {
    "native": {"type": "image_url", "image_url": {"url": PNG}},
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": PNG}},
    "/v1/responses": {"type": "input_image", "image_url": PNG},
    "/v1/messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}
WAV = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILES = [
    *(("image", dialect, part, {"data": "AAAA", "media_type": "image/png"}) for dialect, part in IMAGES.items()),
    *(("audio", dialect, WAV, {"data": "AAAA", "format": "wav"}) for dialect in IMAGES if dialect != "/v1/messages"),
]


@pytest.mark.parametrize(("medium", "dialect", "part", "source"), FILES)
@pytest.mark.parametrize("taken", [False, True])
async def test_parts_reach_a_backend_that_takes_them(elsewhere, medium, dialect, part, source, taken) -> None:
    elsewhere.backend.takes = TEXT_ONLY | {medium} if taken else TEXT_ONLY
    path = f"{ACCOUNT}/run/{elsewhere.model}" if dialect == "native" else dialect
    kind = "input_text" if dialect == "/v1/responses" else "text"
    content = [{"type": kind, "text": "one"}, part, {"type": kind, "text": "two"}]
    body: dict[str, Any] = {"model": elsewhere.model, "max_tokens": 9}
    body["input" if dialect == "/v1/responses" else "messages"] = [{"role": "user", "content": content}]
    answer = await elsewhere.http.post(path, json=body)
    if not taken:
        assert answer.status_code == 400 and answer.json()["errors"][0]["code"] == 5006
        assert "are not supported" in answer.text and elsewhere.settled == [] and elsewhere.backend.seen == []
        return
    assert answer.status_code == 200 and "one two" in answer.text
    text = [{"type": "text", "text": word} for word in ("one", "two")]
    assert elsewhere.backend.seen == [text[0], {"type": medium, "source": source}, text[1]]
