"""Right bodies of the smaller ways in (Ollama, other servers' rerankers, tokens), and what reads each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve_app.api.fields.body import as_object
from serve_app.api.ollama import read as ollama
from serve_app.api.rerank.read import parse_rerank, parse_score, wants_documents
from serve_app.api.responses import conversation
from serve_app.api.tokens import parse_detokenize, parse_tokenize
from serve_app.api.types import ModelLimits

MODEL = "@cf/pico/pico-instruct"
LIMITS = ModelLimits(context_window=4096, vocab_size=1000)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so"}]
OPTIONS = {"num_predict": 5, "temperature": 0.5, "stop": ["a"], "seed": 3, "num_ctx": 100}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]

Found = dict[str, tuple[dict[str, Any], Callable[[bytes], Any]]]


def _read(parse: Callable[..., Any], *more: Any) -> Callable[[bytes], Any]:
    return lambda data: parse(as_object(data), *more)


READERS: Found = {
    "ollama chat": (
        {"model": MODEL, "messages": TALK, "options": OPTIONS, "format": "json", "think": False, "keep_alive": "5m"},
        _read(ollama.parse_ollama_chat, MODEL, LIMITS),
    ),
    "ollama generate": (
        {"model": MODEL, "prompt": "hi", "system": "so", "raw": False, "options": OPTIONS, "logprobs": True},
        _read(ollama.parse_ollama_generate, MODEL, LIMITS),
    ),
    "ollama embed": ({"model": MODEL, "input": ["a", "b"], "truncate": True}, _read(ollama.parse_ollama_embed, MODEL)),
    "ollama embeddings": ({"model": MODEL, "prompt": "a"}, _read(ollama.parse_ollama_embeddings, MODEL)),
    "ollama name": (
        {"model": MODEL, "stream": True},
        lambda b: (_read(ollama.model_of)(b), _read(ollama.wants_stream)(b)),
    ),
    "rerank documents": (
        {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True},
        lambda b: (_read(parse_rerank, MODEL)(b), wants_documents(as_object(b), default=False)),
    ),
    "rerank texts": ({"query": "a", "texts": ["b"], "raw_scores": True}, _read(parse_rerank, MODEL)),
    "score": ({"model": MODEL, "text_1": "a", "text_2": ["b", "c"]}, _read(parse_score, MODEL)),
    "conversation": ({"metadata": {"a": "b"}, "items": ITEMS}, _read(conversation.parse_create)),
    "conversation items": ({"items": ITEMS}, _read(conversation.parse_items)),
    "conversation update": ({"metadata": {"a": "b"}}, _read(conversation.parse_update)),
    "tokenize": ({"model": MODEL, "messages": TALK, "return_token_strs": True}, _read(parse_tokenize, MODEL, LIMITS)),
    "detokenize": ({"model": MODEL, "tokens": [1, 2, 3]}, _read(parse_detokenize, 1000)),
}
