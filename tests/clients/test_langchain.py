"""LangChain's clients of OpenAI and of Cloudflare, unmodified, pointed here by their base URL alone."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_cloudflare import ChatCloudflareWorkersAI, CloudflareWorkersAIEmbeddings, CloudflareWorkersAIReranker
from langchain_core.messages import BaseMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT, EMBED, RERANK
from tests.weather import WEATHER

QUESTION = "What does math.sqrt do?"
CLIENTS = ["openai", "responses", "native", "compatible"]


@pytest.fixture(params=CLIENTS)
def model(request, stack) -> Any:
    if request.param in ("openai", "responses"):
        return ChatOpenAI(
            model=CHAT,
            api_key=stack.key,
            base_url=f"{stack.url}/v1",
            temperature=0,
            max_retries=0,
            stream_usage=True,
            use_responses_api=request.param == "responses",
        )
    return ChatCloudflareWorkersAI(
        model=CHAT,
        cloudflare_account_id=ACCOUNT,
        cloudflare_api_token=stack.key,
        cloudflare_api_base=f"{stack.url}/client/v4",
        endpoint_format="openai_compatible" if request.param == "compatible" else "workers_ai",
        temperature=0,
        session_id="one conversation",
        reject_if_busy=False,
    )


def test_whole_streamed_and_cut(model):
    whole = model.invoke(QUESTION)
    assert "square root" in whole.text
    assert model.invoke(QUESTION, max_tokens=3).text != whole.text
    pieces: list[BaseMessageChunk] = list(model.stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == whole.text


def test_tools(model, request):
    question = HumanMessage("What is the weather in Paris?")
    armed = model.bind_tools([WEATHER])
    answer = armed.invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    if "compatible" not in request.node.callspec.id:
        # OpenAI's deltas are not read by the Cloudflare client, here as at Cloudflare.
        gathered = None
        for piece in armed.stream([question]):
            gathered = piece if gathered is None else gathered + piece
        assert [(c["name"], c["args"]) for c in gathered.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = ToolMessage("sunny, 21 C", tool_call_id=call["id"])
    assert armed.invoke([question, answer, result]).text


def test_embeddings_and_reranking(stack):
    ours = CloudflareWorkersAIEmbeddings(
        account_id=ACCOUNT, api_token=stack.key, model_name=EMBED, api_base_url=f"{stack.url}/client/v4/accounts"
    )
    theirs = OpenAIEmbeddings(
        model=EMBED, api_key=stack.key, base_url=f"{stack.url}/v1", check_embedding_ctx_length=False
    )
    texts = ["one", "two", "three"]
    a, b = ours.embed_documents(texts), theirs.embed_documents(texts)
    assert [len(v) for v in a] == [384] * 3
    assert a[1] == pytest.approx(b[1], abs=1e-6)
    assert a[1] == pytest.approx(ours.embed_query("two"), abs=1e-6)
    ranker = CloudflareWorkersAIReranker(
        account_id=ACCOUNT, api_token=stack.key, model_name=RERANK, api_base_url=f"{stack.url}/client/v4/accounts"
    )
    [best] = ranker.rerank("How is a square root computed?", ["Close a file.", "Return the square root of x."], top_k=1)
    assert best.index == 1
