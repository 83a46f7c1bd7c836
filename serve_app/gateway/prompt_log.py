"""Keeps prompts and answers of accounts that an operator has switched it on for; of all others it sees nothing.

What is kept is what the model was asked and what it answered, whatever the dialect, without anything that looks like a
key. It goes to the store with everything else that is written in groups, and never to a log or a trace.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from serve_app.api.errors import as_api_error
from serve_app.api.types import (
    EmbedRequest,
    Event,
    GenerateRequest,
    ReasoningDelta,
    RerankRequest,
    TaskRequest,
    TextDelta,
    ToolCallDelta,
)
from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.callers.book import AccountBook
from serve_app.state.kept.prompt_log import PromptLog
from serve_app.tasks.model import ServedModel

# Of one text, and of a prompt or an answer; what is longer is cut in its middle.
MOST_CHARS = 64 * 1024
MOST_IN_ALL = 4 * MOST_CHARS
HIDDEN = "[key]"
# What keys of well-known services look like, and whatever follows a word that announces one.
_KNOWN = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}"
    r"|AIza[\w-]{30,}|whsec_[\w+/=]{16,})"
    # A JWT: looked for once in a word, or a text of nothing but its first letters would take seconds.
    r"|(?<![\w-])(?=[\w-]*\beyJ)[\w-]{11,}\.[\w-]{8,}\.[\w-]*"
)
_ANNOUNCED = re.compile(
    r"(?i)\b(bearer\s+|(?:api[_-]?key|token|secret|password|passwd)[\"']?\s*[:=]\s*[\"']?)([^\s\"',;]{8,})"
)
_WORD = re.compile(r"[\w-]{16,512}")


class Prompts:
    """``book``: whose keys are hidden wherever they stand, whatever they look like."""

    def __init__(self, kept: PromptLog, book: AccountBook) -> None:
        self._kept, self._book = kept, book

    def wanted(self, caller: Caller) -> bool:
        return self._kept.days(caller.account) is not None

    def watched(self, request_id: str, caller: Caller, model: ServedModel, request: TaskRequest, answer: Any) -> Any:
        """The ``answer`` of a task's ``run``; an iterator of events is kept when it ends, in whatever way."""
        began = time.time()
        if isinstance(request, GenerateRequest):
            events, *more = answer
            if request.number:
                request_id += f".{request.number}"
            return self._listen(events, request_id, caller, model, request, began), *more
        self._keep(request_id, caller, model, request, None, began)
        return answer

    def refused(
        self, request_id: str, caller: Caller, model: ServedModel, request: TaskRequest, error: Exception
    ) -> None:
        told = {"error": self.hidden(as_api_error(error, request_id).message)}
        self._keep(request_id, caller, model, request, told, time.time())

    async def _listen(
        self,
        events: AsyncIterator[Event],
        request_id: str,
        caller: Caller,
        model: ServedModel,
        request: GenerateRequest,
        began: float,
    ) -> AsyncIterator[Event]:
        choices: dict[int, dict[str, Any]] = {}
        try:
            async for event in events:
                _collect(choices, event)
                yield event
        finally:
            if hasattr(events, "aclose"):
                await events.aclose()
            answer = [self._choice(choice) for _, choice in sorted(choices.items())]
            self._keep(request_id, caller, model, request, answer, began)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        calls = [{name: self.hidden(text) for name, text in call.items()} for call in choice["tool_calls"].values()]
        texts = {name: self.hidden("".join(choice[name])) for name in ("text", "reasoning") if choice[name]}
        return {**texts, **({"tool_calls": calls} if calls else {})}

    def _keep(
        self, request_id: str, caller: Caller, model: ServedModel, request: TaskRequest, answer: Any, began: float
    ) -> None:
        prompt = self._plain(_asked(request), [MOST_IN_ALL])
        body = {"id": request_id, "model": model.id, "prompt": prompt, "answer": answer}
        self._kept.add(caller.account, request_id, began, orjson.dumps(body))

    def _plain(self, value: Any, left: list[int]) -> Any:
        """``left``: how many characters may still come; values beyond are left out."""
        if isinstance(value, str):
            left[0] -= min(len(value), MOST_CHARS) + 8
            return self.hidden(value)
        if isinstance(value, dict):
            return {str(name): self._plain(part, left) for name, part in value.items() if left[0] > 0}
        if isinstance(value, list | tuple):
            found = []
            for at, part in enumerate(value):
                if left[0] <= 0:
                    found.append(f"[{len(value) - at} more left out]")
                    break
                found.append(self._plain(part, left))
            return found
        left[0] -= 8
        return value if isinstance(value, int | float | bool) or value is None else str(value)

    def hidden(self, text: str) -> str:
        """Without keys, and not longer than may be."""
        if len(text) > MOST_CHARS:
            half = MOST_CHARS // 2
            # At spaces, so that no half of a key stays.
            begin, end = text[:half].rpartition(" ")[0], text[-half:].partition(" ")[2]
            text = f"{begin}\n[{len(text) - len(begin) - len(end)} characters left out]\n{end}"
        text = _WORD.sub(lambda word: HIDDEN if self._book.knows(hash_key(word[0])) else word[0], text)
        return _ANNOUNCED.sub(lambda found: found[1] + HIDDEN, _KNOWN.sub(HIDDEN, text))


def _asked(request: TaskRequest) -> dict[str, Any]:
    if isinstance(request, GenerateRequest):
        ids = None if request.prompt_ids is None else f"{len(request.prompt_ids)} token ids"
        found = {"messages": request.messages, "prompt": request.prompt or ids, "tools": request.tools}
        return {name: value for name, value in found.items() if value is not None}
    if isinstance(request, EmbedRequest):
        return {"texts": request.texts}
    if isinstance(request, RerankRequest):
        return {"query": request.queries or request.query, "contexts": request.contexts}
    return {}


def _collect(choices: dict[int, dict[str, Any]], event: Event) -> None:
    if not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
        return
    choice = choices.setdefault(event.index, {"text": [], "reasoning": [], "tool_calls": {}, "chars": 0})
    if isinstance(event, ToolCallDelta):
        call = choice["tool_calls"].setdefault(event.call_index, {"name": "", "arguments": ""})
        call["name"] += event.name
        call["arguments"] += event.arguments
    else:
        choice["text" if isinstance(event, TextDelta) else "reasoning"].append(event.text)
