"""What the gateway's benchmark compares with: a plain Ray Serve ingress and LiteLLM, each on the same simulated engine.

``python -m benchmarks.gateway.sides plain PORT`` is the ingress as ``serve.run`` starts it, in a Ray of its own with
Serve's default settings; ``... upstream PORT`` the simulated engine as an OpenAI server, for LiteLLM. Both end with
their standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from benchmarks import ROOT


def plain_text(tokens: int) -> str:
    """What the plain engine and LiteLLM's answer to a request for so many tokens."""
    return "".join(f"word{index} " for index in range(tokens))


def plain_ingress() -> Any:
    """What people write first: FastAPI in a Serve ingress, a handle stream to the engine, one event per token."""
    from ray import serve

    app = FastAPI()

    @serve.deployment(name="PlainEngine", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.25})
    class PlainEngine:
        async def stream(self, count: int) -> AsyncIterator[str]:
            for index in range(count):
                yield f"word{index} "
                await asyncio.sleep(0)

    @serve.deployment(name="Plain", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.25})
    @serve.ingress(app)
    class Plain:
        def __init__(self, engine: Any) -> None:
            self._engine = engine.options(stream=True)

        @app.post("/v1/chat/completions")
        async def chat(self, body: dict) -> Any:
            words = self._engine.stream.remote(body["max_tokens"])
            if not body.get("stream"):
                text = "".join([word async for word in words])
                return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}

            async def events() -> AsyncIterator[str]:
                async for word in words:
                    yield "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": word}}]}) + "\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")

        @app.post("/noop")
        async def noop(self) -> dict[str, bool]:
            return {"ok": True}

    return Plain.bind(PlainEngine.bind())


class Side:
    """A process that is compared with; it ends when its standard input does."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )

    def check(self) -> None:
        """Raises :class:`SystemExit` with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise SystemExit(f"no figures: a side ended by itself\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


def plain_default(port: int, logs: Path) -> Side:
    """The plain ingress in a fresh process that has none of our settings of Ray and Serve."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return Side([sys.executable, "-m", "benchmarks.gateway.sides", "plain", str(port)], environment, logs / "plain.log")


def litellm(python: str, port: int, upstream: int, model: str, key: str, folder: Path) -> list[Side]:
    """LiteLLM's proxy with one worker, as its documentation starts it, and the OpenAI server behind it."""
    config = folder / "config.yaml"
    said = {"model": f"openai/{model}", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": model, "litellm_params": said}]}))
    # Without the map of prices from the network; without a master key it does not start.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": f"sk-{key}"}
    environment.pop("PYTHONPATH", None)
    program = str(Path(python).with_name("litellm"))
    server = [sys.executable, "-m", "benchmarks.gateway.sides", "upstream", str(upstream)]
    proxy = [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    return [Side(server, {**os.environ}, folder / "upstream.log"), Side(proxy, environment, folder / "litellm.log")]


async def _upstream(port: int) -> None:
    """An OpenAI chat server on raw streams, so that it costs next to nothing: as many words as tokens are asked for."""

    def chunk(delta: dict[str, str], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(length))
                count = asked.get("max_tokens", 16)
                if asked.get("stream"):
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    )
                    for index in range(count):
                        part = chunk({"content": f"word{index} "}, "length" if index == count - 1 else None)
                        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                        await asyncio.sleep(0)
                    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                else:
                    text = plain_text(count)
                    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
                    usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
                    body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                    answer = json.dumps({**body, "usage": usage}).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                        b"content-length: %d\r\n\r\n%s" % (len(answer), answer)
                    )
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    await asyncio.start_server(serve, "127.0.0.1", port)
    await asyncio.to_thread(sys.stdin.read)


def _plain(port: int) -> None:
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(plain_ingress(), name="plain", route_prefix="/")
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    what, where = sys.argv[1:]
    _plain(int(where)) if what == "plain" else asyncio.run(_upstream(int(where)))
