"""Ollama's API, as its documentation has it."""

from __future__ import annotations

from typing import Any

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.shapes import NUMBER, any_of, filled, length, problem

ASK = [{"role": "user", "content": "What does math.sqrt do?"}]
DONE = {
    "model": str,
    "created_at": str,
    "done": True,
    "done_reason": any_of("stop", "length"),
    "total_duration": int,
    "load_duration": int,
    "prompt_eval_count": int,
    "prompt_eval_duration": int,
    "eval_count": int,
    "eval_duration": int,
}
DETAILS = {"format": str, "family": str, "parameter_size": str, "quantization_level": str}
MODEL = {"name": str, "model": str, "size": int, "digest": str, "details": DETAILS}
OPTIONS = {"temperature": 0, "num_predict": 24}


def cases(models: Models) -> list[Case]:
    chat = {"model": models.chat, "messages": ASK, "options": OPTIONS}
    prompt = {"model": models.chat, "prompt": ASK[0]["content"], "options": OPTIONS}
    message = {"role": "assistant", "content": filled(str)}
    lines = {"Content-Type": "application/x-ndjson"}
    said, answered = _lines("message"), _lines("response")
    vectors = {"embeddings": length(2, filled(NUMBER)), "total_duration": int}
    embed = {"model": models.embed, "input": ["one", "two"]}
    error = {"error": filled(str)}

    def post(name: str, path: str, body: Any, shape: Any, status: int = 200, needs: Any = "chat") -> Case:
        return Case("ollama", name, "POST", f"/api/{path}", body, status, shape, needs=needs)

    return [
        post("a chat", "chat", {**chat, "stream": False}, {**DONE, "message": message}),
        Case("ollama", "a chat in lines", "POST", "/api/chat", chat, parts=said, lines=True, headers=lines),
        post("a prompt", "generate", {**prompt, "stream": False}, {**DONE, "response": filled(str)}),
        Case("ollama", "a prompt in lines", "POST", "/api/generate", prompt, parts=answered, lines=True,
             headers=lines),
        post("a model is loaded", "generate", {"model": models.chat}, {"done": True, "done_reason": "load"}),
        post("embeddings", "embed", embed, vectors, needs="embed"),
        post("one embedding", "embeddings", {"model": models.embed, "prompt": "one"}, {"embedding": filled(NUMBER)},
             needs="embed"),
        post("a model is shown", "show", {"model": models.chat},
             {"details": DETAILS, "model_info": dict, "capabilities": filled(str), "template": str}),
        post("an unknown model", "chat", {**chat, "model": "no-such-model"}, error, 404),
        post("no model", "chat", {"messages": ASK}, error, 400),
        Case("ollama", "the models", "GET", "/api/tags", shape={"models": filled({**MODEL, "modified_at": str})}),
        Case("ollama", "the models that run", "GET", "/api/ps", shape={"models": [{**MODEL, "expires_at": str}]}),
        Case("ollama", "the version", "GET", "/api/version", shape={"version": str}),
    ]  # fmt: skip


def _lines(field: str) -> Any:
    def check(parts: list[tuple[str, Any]]) -> str | None:
        *pieces, last = [data for _, data in parts]
        if told := problem(last, DONE, "the last line"):
            return told
        if any(piece["done"] for piece in pieces):
            return "a line before the last is done"
        said = [piece[field]["content"] if field == "message" else piece[field] for piece in pieces]
        return None if "".join(said) else "there is no text"

    return check
