"""The unmodified SDKs, pointed here by nothing but their base URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import httpx
import numpy as np
import pytest
from cloudflare import Cloudflare
from openai import AuthenticationError, NotFoundError, OpenAI

from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT, EMBED, RERANK

QUESTION = [{"role": "user", "content": "What does math.sqrt do?"}]


@pytest.fixture(params=["/v1", f"/client/v4/accounts/{ACCOUNT}/ai/v1"])
def openai(request, stack):
    return OpenAI(api_key=stack.key, base_url=stack.url + request.param, max_retries=0)


def test_openai_chat_plain_and_streamed(openai):
    plain = openai.chat.completions.create(model=CHAT, messages=QUESTION, temperature=0)
    text = plain.choices[0].message.content
    assert "square root" in text and plain.choices[0].finish_reason == "stop"
    chunks = list(
        openai.chat.completions.create(
            model=CHAT, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_openai_completions_embeddings_models(openai):
    done = openai.completions.create(model=CHAT, prompt="import os\n", max_tokens=5, temperature=0)
    assert done.choices[0].finish_reason in ("stop", "length") and done.usage.completion_tokens <= 5
    as_base64 = openai.embeddings.create(model=EMBED, input=["one", "two"])
    as_floats = openai.embeddings.create(model=EMBED, input=["one", "two"], encoding_format="float")
    assert np.allclose(as_base64.data[1].embedding, as_floats.data[1].embedding, atol=1e-6)
    assert CHAT in [m.id for m in openai.models.list()]
    assert openai.models.retrieve(CHAT).id == CHAT


def test_openai_errors(openai, stack):
    with pytest.raises(NotFoundError, match="No such model"):
        openai.chat.completions.create(model="@cf/no/such", messages=QUESTION)
    stranger = OpenAI(api_key="wrong-key-wrong-key", base_url=f"{stack.url}/v1", max_retries=0)
    with pytest.raises(AuthenticationError):
        stranger.models.list()


def test_cloudflare_sdk(stack):
    client = Cloudflare(api_token=stack.key, base_url=f"{stack.url}/client/v4")
    answer = client.ai.run(CHAT, account_id=ACCOUNT, prompt="What does math.sqrt do?", temperature=0)
    assert "square root" in answer["response"]
    vectors = client.ai.run(EMBED, account_id=ACCOUNT, text=["a", "b"])
    assert vectors["shape"] == [2, 384]
    contexts = [{"text": "Return the square root of x."}, {"text": "Close a file."}]
    ranked = client.ai.run(
        RERANK,
        account_id=ACCOUNT,
        text="",
        extra_body={"query": "How do I compute a square root?", "contexts": contexts},
    )
    assert ranked["response"][0]["id"] == 0
    names = {m["name"] for m in client.ai.models.list(account_id=ACCOUNT, per_page=1)}
    assert {CHAT, EMBED, RERANK} <= names
    assert client.ai.models.schema.get(account_id=ACCOUNT, model=CHAT)


def test_python_handle_and_command_line(stack):
    """From drivers of their own, as users have them."""
    script = textwrap.dedent(
        f"""
        import asyncio
        import sys

        from serve_app import AI, AsyncAI
        from serve_app.binding import AIError
        from serve_app.cli import main

        ai = AI()
        inputs = {{"prompt": "What does math.sqrt do?", "temperature": 0}}
        whole = ai.run("{CHAT}", inputs)
        assert "square root" in whole["response"], whole
        frames = list(ai.run("{CHAT}", {{**inputs, "stream": True}}))
        assert "".join(f["response"] for f in frames) == whole["response"]
        assert frames[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        kept = list(ai.run("{CHAT}", {{**inputs, "stream": True}}, {{"resumable": 30}}))
        assert "".join(f["response"] for f in kept) == whole["response"] and "usage" in kept[-1]
        assert ai.run("{CHAT}", inputs, {{"resumable": 30}})["response"] == whole["response"]
        assert ai.run("{EMBED}", {{"text": "x"}})["shape"] == [1, 384]
        batch = ai.batch("{CHAT}", (inputs for _ in range(2)))
        assert [answer["result"]["response"] for answer in batch.results()] == [whole["response"]] * 2
        try:
            ai.run("@cf/no/such", inputs)
        except AIError as error:
            assert (error.code, error.status) == (5007, 400)
        else:
            raise SystemExit("no error for an unknown model")

        async def twin():
            ai = AsyncAI()
            text = "".join([f["response"] async for f in ai.stream("{CHAT}", inputs)])
            kept = [f["response"] async for f in ai.stream("{CHAT}", inputs, {{"resumable": 30}})]
            assert "".join(kept) == text == (await ai.run("{CHAT}", inputs))["response"] == whole["response"]

        asyncio.run(twin())
        print("all right")
        sys.exit(main(["run", "@cf/no/such", "hi"]))
        """
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment["SERVE_APP_HOME"] = str(stack.home)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "all right" in done.stdout and "No such model" in done.stderr, done.stderr

    command = [sys.executable, "-m", "serve_app.cli", "run", CHAT, "What does math.sqrt do?", "--temperature", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "square root" in done.stdout, done.stderr


def test_a_resumable_stream_goes_on_without_its_client(stack):
    """Serve cancels what a request has called when its client leaves; not this."""
    body = {"prompt": "Write about lists. ", "raw": True, "ignore_eos": True, "max_tokens": 200, "temperature": 0}
    url = f"{stack.api}/run/{CHAT}"
    with httpx.Client(headers=stack.headers, timeout=120) as http:
        alone = http.post(url, json=body).json()["result"]["response"]
        text, last = "", 0

        def read(answer: httpx.Response, events: int | None = None) -> None:
            nonlocal text, last
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    last = int(line[4:])
                elif line.startswith("data: {"):
                    text += json.loads(line[6:])["response"]
                elif not line and last == events:
                    return

        asked = {**body, "stream": True, "options": {"resumable": 60}}
        with http.stream("POST", url, json=asked) as answer:
            stream_id = answer.headers["cf-ray"]
            read(answer, 5)
        assert last == 5 and alone.startswith(text) and text != alone
        # It is not only kept, it goes on.
        again = f"{stack.api}/requests/{stream_id}/stream"
        with http.stream("GET", again, headers={"Last-Event-ID": str(last)}) as answer:
            read(answer)
        assert text == alone
        path = http.get(f"{stack.api}/requests/{stream_id}").json()
        assert path["status"] == "done" and [e["event"] for e in path["events"]].count("routed") == 1
