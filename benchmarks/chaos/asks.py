"""What clients ask: every dialect and task, short and long, with answers that are always the same."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.dialects import CHAT, LABELS, MESSAGES, NATIVE, NUMBERS, RESPONSES, TRANSCRIPT, Dialect
from benchmarks.serving.startup import MODEL

EMBED = "@cf/sentence-transformers/all-minilm-l6-v2"
RERANK = "@cf/pico/pico-reranker"
SENTIMENT, SHAPES, DETECTOR = "@cf/pico/pico-sentiment", "@cf/pico/pico-shapes", "@cf/pico/pico-detector"
HEARS = "@cf/chaos/hears"
TOP = "/client/v4/accounts/local"
ADAPTERS = ("pirate", "json")
LONG = "Write something long about Python. "
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
}


@dataclass(slots=True, frozen=True)
class Ask:
    """One request. ``streams``: it may be asked for in a stream; ``body`` then gets ``stream``. ``alike``: asks of one
    group have one text, in whatever dialect.
    """

    name: str
    path: str
    dialect: Dialect
    body: dict[str, Any]
    streams: bool = True
    alike: str = ""

    @property
    def model(self) -> str:
        """The one that does it, without an adapter."""
        named = str(self.body.get("model") or self.path.partition("/ai/run/")[2])
        return "@".join(named.split("@")[:2])

    @property
    def adapted(self) -> bool:
        """Whether it is for an adapter."""
        return "lora" in self.body or str(self.body.get("model", "")).count("@") > 1


def asks() -> list[Ask]:
    """All of them; the first ones are short and stand for the rest in probes."""
    run, chat, complete = f"/client/v4/accounts/local/ai/run/{MODEL}", "/v1/chat/completions", "/v1/completions"
    greedy, drawn = {"temperature": 0}, {"temperature": 0.8, "seed": 11}
    model, usage = {"model": MODEL}, {"stream_options": {"include_usage": True}}
    endless = {"raw": True, "ignore_eos": True, **greedy}
    contexts = [{"text": "Return the square root of x."}, {"text": "Join two paths."}]
    found = [
        Ask("probe chat", chat, CHAT,
            {**model, "messages": _user("What does math.sqrt do?"), "max_tokens": 8, **greedy}),
        Ask("embed", f"/client/v4/accounts/local/ai/run/{EMBED}", NUMBERS, {"text": ["one text", "two"]}, False),
        Ask("rerank", f"/client/v4/accounts/local/ai/run/{RERANK}", NUMBERS,
            {"query": "square root", "contexts": contexts}, False),
        Ask("openai embeddings", "/v1/embeddings", NUMBERS, {"model": EMBED, "input": ["one text", "two"]}, False),
        Ask("native prompt", run, NATIVE, {"prompt": LONG * 8, "max_tokens": 200, **endless}),
        Ask("native short", run, NATIVE, {"prompt": LONG, "max_tokens": 24, **endless}),
        Ask("completions", complete, CHAT, {**model, "prompt": LONG * 12, "max_tokens": 160, **endless, **usage}),
        Ask("completions of many", complete, CHAT,
            {**model, "prompt": [LONG, LONG * 2, LONG * 3], "max_tokens": 20, **endless, **usage}),
        Ask("logprobs", chat, CHAT, {**model, "messages": _user("What does re.sub do?"), "max_tokens": 60, **greedy,
                                     "logprobs": True, "ignore_eos": True, **usage}),
        Ask("drawn twice", chat, CHAT, {**model, "messages": _user("Tell me about lists."), "n": 2, "max_tokens": 48,
                                        **drawn, "ignore_eos": True, **usage}),
        Ask("schema", chat, CHAT,
            {**model, "messages": _user("Where is the Eiffel tower?"), "max_tokens": 40, **greedy, **usage,
             "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}}),
        Ask("tool", chat, CHAT,
            {**model, "messages": _user("What is the weather in Paris?"), "max_tokens": 60, **greedy, **usage,
             "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
    ]  # fmt: skip
    # It goes on inside its thoughts.
    thinks = [*_user("What does math.sqrt do?"), {"role": "assistant", "content": "<think>"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    for name, path, dialect, more in (
        ("native reasoning", run, NATIVE, goes_on),
        ("openai reasoning", chat, CHAT, {**model, **usage, **goes_on}),
        ("anthropic reasoning", "/v1/messages", MESSAGES, {**model, "thinking": {"type": "adaptive"}}),
    ):
        found.append(Ask(name, path, dialect, {"messages": thinks, "max_tokens": 48, **greedy, **more}))
    for question in ("What does itertools.chain do?", "What does json.dumps do?"):
        limits = {"max_tokens": 64, **greedy}
        found += [
            Ask("native chat", run, NATIVE, {"messages": _user(question), **limits}, alike=question),
            Ask("openai chat", chat, CHAT, {**model, "messages": _user(question), **limits, **usage}, alike=question),
            Ask("responses", "/v1/responses", RESPONSES,
                {**model, "input": question, "max_output_tokens": 64, **greedy}, alike=question),
            Ask("anthropic", "/v1/messages", MESSAGES, {**model, "messages": _user(question), **limits},
                alike=question),
        ]  # fmt: skip
    # Adapters that come with the model; in OpenAI's and Anthropic's dialects they are models of their own.
    limits = {"max_tokens": 64, **greedy}
    for adapter in ADAPTERS:
        asked = {"messages": _user("What does math.sqrt do?"), **limits}
        own = {"model": f"{MODEL}@{adapter}"}
        found += [
            Ask(f"native {adapter}", run, NATIVE, {**asked, "lora": adapter}, alike=adapter),
            Ask(f"openai {adapter}", chat, CHAT, {**asked, **own, **usage}, alike=adapter),
            Ask(f"anthropic {adapter}", "/v1/messages", MESSAGES, {**asked, **own}, alike=adapter),
        ]
    return found


def small_tasks() -> list[Ask]:
    """What predictors answer, files of strangers among it; the first one stands for the rest in probes."""
    run = f"{TOP}/ai/run/"
    pictures = [base64.b64encode(_png(size, seed)).decode() for size, seed in ((64, 3), (700, 5))]
    sounds = [base64.b64encode(_wav(seconds)).decode() for seconds in (0.7, 7.3)]
    return [
        Ask("picture", run + SHAPES, LABELS, {"image": pictures[0]}, False),
        Ask("large picture", run + SHAPES, LABELS, {"image": pictures[1], "top_k": 2}, False),
        Ask("sentiment", run + SENTIMENT, LABELS, {"text": "What a wonderful evening!"}, False),
        Ask("long sentiment", run + SENTIMENT, LABELS, {"text": "The soup was cold and bland. " * 20}, False),
        Ask("speech", run + HEARS, TRANSCRIPT, {"audio": sounds[0], "language": "en"}, False),
        Ask("long speech", run + HEARS, TRANSCRIPT, {"audio": sounds[1], "language": "de"}, False),
    ]


def probes() -> list[Ask]:
    """One short request a model: when all of them are answered, the service is back."""
    return asks()[:3]


def _png(size: int, seed: int) -> bytes:
    """A picture of stripes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = b"\0" + bytes((x * seed * (1 + c)) % 256 for x in range(size) for c in range(3))
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    body = zlib.compress(row * size)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _wav(seconds: float, rate: int = 16_000) -> bytes:
    """A tone that rises."""
    count = int(seconds * rate)
    samples = [int(9000 * math.sin(2 * math.pi * (200 + 300 * i / count) * i / rate)) for i in range(count)]
    data = struct.pack(f"<{count}h", *samples)
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16,
                       b"data", len(data))  # fmt: skip
    return head + data


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
