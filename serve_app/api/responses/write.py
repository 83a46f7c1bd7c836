"""Writing the OpenAI Responses dialect: whole responses and their events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import orjson

from serve_app.api import identity, sse
from serve_app.api.errors import ApiError, Stopped, as_api_error
from serve_app.api.fields.content import content_text
from serve_app.api.openai.write import chat_logprobs, close
from serve_app.api.responses.items import input_parts, item_id, usage_json
from serve_app.api.responses.read import ResponsesRequest
from serve_app.api.types import ChoiceDone, Event, ReasoningDelta, TextDelta, ToolCallDelta, Usage

log = logging.getLogger(__name__)

Keep = Callable[[dict[str, Any]], Awaitable[None]]


class _Response:
    """A response that grows by events. Each :meth:`feed` gives the frames that tell of the growth, so that the whole
    response and the streamed one cannot differ."""

    def __init__(self, request: ResponsesRequest) -> None:
        self.body: dict[str, Any] = {
            "id": f"resp_{identity.answer_id()}",
            "object": "response",
            "created_at": identity.created(),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "model": request.generate.model,
            "output": [],
            "previous_response_id": request.previous,
            "store": request.store,
            **request.shown,
            "usage": None,
        }
        self._wants_logprobs = request.generate.sampling.logprobs is not None
        # The type of the item that grows, "" between items.
        self._open = ""
        # Log-probabilities of tokens without text, which belong to the text that follows them, or to a call.
        self._untold: list[dict[str, Any]] = []
        self._sent = 0
        self._finish = "stop"

    def start(self) -> list[bytes]:
        return [
            self._event("response.created", response=self.body),
            self._event("response.in_progress", response=self.body),
        ]

    def feed(self, event: Event) -> list[bytes]:
        if isinstance(event, TextDelta):
            return self._text(event)
        if isinstance(event, ReasoningDelta):
            return self._reason(event.text)
        if isinstance(event, ToolCallDelta):
            return self._call(event)
        if isinstance(event, ChoiceDone):
            self._finish = event.finish_reason
            if self._open == "message":
                self._item["content"][0]["logprobs"] += self._untold
            frames = self._close()
            # An empty answer is an answer: readers look for a message.
            if all(item["type"] == "reasoning" for item in self.body["output"]):
                frames += [*self._open_message(), *self._close()]
            return frames
        if not isinstance(event, Usage):
            return []
        self.body["usage"] = usage_json(event)
        if self._finish == "length":
            self.body["status"] = "incomplete"
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.body["status"] = "completed"
            self.body["completed_at"] = int(time.time())
        return []

    def end(self) -> bytes:
        return self._event(f"response.{self.body['status']}", response=self.body)

    def fail(self, error: ApiError) -> bytes:
        if isinstance(error, Stopped):
            # OpenAI's own word for a response that was told to stop; its items stay as far as they came.
            self.body["status"] = "cancelled"
            return self.end()
        self.body["status"] = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.body["error"] = {"code": code, "message": error.message}
        return self.end()

    def _event(self, kind: str, **body: Any) -> bytes:
        frame = sse.event(kind, {"type": kind, "sequence_number": self._sent, **body})
        self._sent += 1
        return frame

    def _new_id(self, kind: str) -> str:
        return item_id(kind, self.body["id"], len(self.body["output"]))

    @property
    def _item(self) -> dict[str, Any]:
        return self.body["output"][-1]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.body["output"]) - 1}

    def _add(self, item: dict[str, Any]) -> bytes:
        self.body["output"].append(item)
        return self._event("response.output_item.added", output_index=self._place["output_index"], item=item)

    def _done(self) -> bytes:
        self._item["status"] = "incomplete" if self._finish == "length" else "completed"
        return self._event("response.output_item.done", output_index=self._place["output_index"], item=self._item)

    def _open_message(self) -> list[bytes]:
        item: dict[str, Any] = {
            "id": self._new_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        return self._open_item(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _open_item(self, item: dict[str, Any], part: dict[str, Any]) -> list[bytes]:
        frames = [*self._close(), self._add(item)]
        self._open = item["type"]
        item["content"].append(part)
        return [*frames, self._event("response.content_part.added", **self._place, content_index=0, part=part)]

    def _text(self, delta: TextDelta) -> list[bytes]:
        if self._wants_logprobs and delta.logprobs:
            self._untold += chat_logprobs(delta.logprobs)["content"]
        if not delta.text:
            return []
        frames = [] if self._open == "message" else self._open_message()
        found, self._untold = self._untold, []
        part = self._item["content"][0]
        part["text"] += delta.text
        part["logprobs"] += found
        shown = {"delta": delta.text, "logprobs": found}
        return [*frames, self._event("response.output_text.delta", **self._place, content_index=0, **shown)]

    def _reason(self, piece: str) -> list[bytes]:
        frames = []
        if self._open != "reasoning":
            item = {"id": self._new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            frames = self._open_item({**item, "content": []}, {"type": "reasoning_text", "text": ""})
        self._item["content"][0]["text"] += piece
        return [*frames, self._event("response.reasoning_text.delta", **self._place, content_index=0, delta=piece)]

    def _close(self) -> list[bytes]:
        """Ends the message or the reasoning that grows, if one does."""
        if not self._open:
            return []
        part = self._item["content"][0]
        kind, shown = "reasoning_text", {"text": part["text"]}
        if self._open == "message":
            kind, shown = "output_text", {**shown, "logprobs": part["logprobs"]}
        self._open = ""
        return [
            self._event(f"response.{kind}.done", **self._place, content_index=0, **shown),
            self._event("response.content_part.done", **self._place, content_index=0, part=part),
            self._done(),
        ]

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        frames = self._close()
        self._untold = []
        if call.name:
            head = {"id": self._new_id("fc"), "type": "function_call", "status": "in_progress"}
            frames.append(self._add({**head, "call_id": call.id, "name": call.name, "arguments": ""}))
        if call.arguments:
            frames.append(self._event("response.function_call_arguments.delta", **self._place, delta=call.arguments))
            self._item["arguments"] += call.arguments
        if call.last:
            done = {"name": self._item["name"], "arguments": self._item["arguments"]}
            frames += [self._event("response.function_call_arguments.done", **self._place, **done), self._done()]
        return frames


def render_response(request: ResponsesRequest, events: Iterable[Event]) -> dict[str, Any]:
    response = _Response(request)
    for event in events:
        response.feed(event)
    return response.body


async def stream_response(request: ResponsesRequest, events: AsyncIterator[Event], keep: Keep) -> AsyncIterator[bytes]:
    """The events of a response. ``keep`` stores the whole one, and has done so when the last event goes out: a client
    may build on it at once."""
    response = _Response(request)
    try:
        for frame in response.start():
            yield frame
        async for event in events:
            for frame in response.feed(event):
                yield frame
        await keep(response.body)
        yield response.end()
        yield sse.DONE
    except Exception as error:
        shown = as_api_error(error)
        if not isinstance(error, ApiError):
            log.error("a stream failed: %s", shown.message, exc_info=error)
        last = response.fail(shown)
        if request.background:
            await keep(response.body)
        yield last
        yield sse.DONE
    finally:
        await close(events)


def render_queued(request: ResponsesRequest) -> dict[str, Any]:
    """A response that is made in the background, before it has begun."""
    return {**_Response(request).body, "status": "queued"}


def shown_in(frame: bytes) -> dict[str, Any] | None:
    """The response in a frame of its stream, None if it tells of a part only."""
    for line in frame.splitlines():
        if line.startswith(b"data: {"):
            return orjson.loads(line.removeprefix(b"data: ")).get("response")
    return None


def input_items(messages: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """What a response was an answer to, as items."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            said = content_text(content)
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": said})
        elif role == "assistant" and content is not None:
            part = {"type": "output_text", "text": content_text(content), "annotations": [], "logprobs": []}
            items.append({"type": "message", "role": role, "content": [part]})
        elif content is not None:
            items.append({"type": "message", "role": role, "content": input_parts(content)})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call.get("id"), **call["function"]})
    for i, item in enumerate(items):
        item |= {"id": f"item_{response_id.removeprefix('resp_')}_{i}", "status": "completed"}
    return items


def as_messages(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The output of a response as messages of the conversation that goes on from it."""
    out: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for item in response["output"]:
        if item["type"] == "reasoning":
            thought = {"reasoning_content": item["content"][0]["text"]}
            continue
        if item["type"] == "message":
            out.append({"role": "assistant", "content": item["content"][0]["text"], **thought})
            continue
        if not out:
            out.append({"role": "assistant", "content": None, **thought})
        call = {"id": item["call_id"], "type": "function", "function": {k: item[k] for k in ("name", "arguments")}}
        out[-1].setdefault("tool_calls", []).append(call)
    return out
