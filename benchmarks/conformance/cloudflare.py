"""Workers AI's own routes: the envelope, native streams, the catalogue, errors by number."""

from __future__ import annotations

from typing import Any

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.shapes import NUMBER, filled, length, problem

PROMPT = {"prompt": "What does math.sqrt do?", "temperature": 0, "max_tokens": 24}
USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}


def _well(result: Any) -> dict[str, Any]:
    return {"result": result, "success": True, "errors": [], "messages": list}


def _wrong(code: int) -> dict[str, Any]:
    return {"success": False, "errors": length(1, {"code": code, "message": filled(str)})}


def cases(models: Models) -> list[Case]:
    base = f"/client/v4/accounts/{models.account}/ai"
    run = f"{base}/run/{models.chat}"
    scores = filled({"id": int, "score": NUMBER})
    rank = {"query": "a square root", "contexts": [{"text": "the square root of x"}, {"text": "close"}]}
    generic = {"model": models.chat, "input": PROMPT}

    def post(name: str, path: str, body: Any, shape: Any, status: int = 200, needs: Any = "chat") -> Case:
        return Case("workers ai", name, "POST", path, body, status, shape, needs=needs)

    return [
        post("a run", run, PROMPT, _well({"response": filled(str), "usage": USAGE})),
        post("an id that is encoded", run.replace(models.chat, models.chat.replace("/", "%2F")), PROMPT,
             _well({"response": filled(str)})),
        post("the generic form", f"{base}/run", generic, _well({"response": filled(str)})),
        Case("workers ai", "a native stream", "POST", run, {**PROMPT, "stream": True}, parts=_frames,
             headers={"Content-Type": "text/event-stream"}),
        post("vectors", f"{base}/run/{models.embed}", {"text": ["one", "two"]},
             _well({"shape": length(2, int), "data": length(2, filled(NUMBER))}), needs="embed"),
        post("ranks", f"{base}/run/{models.rerank}", rank, _well({"response": scores}), needs="rerank"),
        post("neither prompt nor messages", run, {}, _wrong(5006), 400),
        post("an unknown model", f"{base}/run/@cf/no/such", PROMPT, _wrong(5007), 400),
        Case("workers ai", "a page of the catalogue", "GET", f"{base}/models/search?page=1&per_page=1",
             shape=_well(length(1, {"id": str, "name": str, "task": {"id": str, "name": str}, "properties": list}))),
        Case("workers ai", "a page beyond it", "GET", f"{base}/models/search?page=99", shape=_well(length(0, dict))),
        Case("workers ai", "a model's schema", "GET", f"{base}/models/schema?model={models.chat}",
             shape=_well({"input": dict, "output": dict})),
        Case("workers ai", "no key", "POST", run, PROMPT, 401, _wrong(10000), keyless=True),
        Case("workers ai", "another's account", "POST", run.replace(f"/{models.account}/", "/another/"), PROMPT, 403,
             _wrong(10000)),
    ]  # fmt: skip


def _frames(parts: list[tuple[str, Any]]) -> str | None:
    *frames, last = [data for _, data in parts]
    if last != "[DONE]":
        return "the stream does not end with [DONE]"
    if told := problem(frames, [{"response": str}], "frames"):
        return told
    if any("usage" in frame for frame in frames[:-1]) or problem(frames[-1].get("usage"), USAGE):
        return "not the last frame alone has the usage"
    return None if any(frame["response"] for frame in frames) else "there is no text"
