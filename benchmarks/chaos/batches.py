"""Batches and a queue beside all other traffic: every line ends in exactly one result, and each answer in one entry.

Whatever a fault does to a submission, it is sent again under its key until it is taken: that must make one batch.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chaos.asks import TOP, Ask
from benchmarks.chaos.dialects import CHAT, LABELS, NATIVE, NUMBERS, TRANSCRIPT, Dialect, Seen
from benchmarks.chaos.weather import Weather
from benchmarks.serving.startup import MODEL
from serve_app.state.spending.ledger import Entry

RUN, OPENAI = f"{TOP}/ai/run/{MODEL}", ("/v1/chat/completions", "/v1/embeddings")
LINES = (3, 10)
PAUSE_S = (0.0, 6.0)
# A server that is started again takes its time; and batches take what other traffic leaves.
TAKEN_S, DONE_S = 300.0, 300.0
AGAIN_S = 0.3
OPEN = 4  # batches at a time
# What a line may end in besides its answer: its workers were lost three times over.
HONEST = 3040


@dataclass(slots=True)
class Line:
    """``results``: the different ones that there were."""

    number: int
    results: list[Seen] = field(default_factory=list)
    refused: int = 0


@dataclass(slots=True)
class Sent:
    """One batch, or one push of messages; ``lines`` by what they call themselves. ``id``: of the entries. ``path``: of
    their asks.
    """

    door: str
    id: str
    lines: dict[str, Line]
    path: str = RUN


class Batches:
    """``wanted(number)``: the answer to the ask of this number."""

    def __init__(
        self, http: httpx.AsyncClient, asks: Sequence[Ask], wanted: Callable[[int], Seen], weather: Weather
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._http = http
        self._asks = asks
        self._wanted = wanted
        self._weather = weather
        self._sent: list[Sent] = []
        self._open: list[Sent] = []
        self._queues: dict[str, str] = {}
        self._answers: set[str] = set()
        native = (NATIVE, NUMBERS, LABELS, TRANSCRIPT)
        self._fits: dict[str, list[int]] = {
            "workers-ai": [
                n
                for n, ask in enumerate(asks)
                if ask.dialect in native and ask.path.startswith(f"{TOP}/ai/run/") and "raw" not in ask.body
            ],
            "openai": [n for n, ask in enumerate(asks) if ask.dialect in (CHAT, NUMBERS) and ask.path in OPENAI],
        }
        self._fits["queue"] = [n for n in self._fits["workers-ai"] if asks[n].path == RUN]

    async def loop(self, dice: random.Random, go_on: Callable[[], bool]) -> None:
        """Submits one after another by all APIs, and reads what is done."""
        doors: list[str] = []
        while go_on():
            doors = doors or dice.sample(sorted(self._fits), len(self._fits))
            door = doors.pop()
            # All lines of a batch are for one model and of one kind.
            path = dice.choice(sorted({self._asks[n].path for n in self._fits[door]}))
            fitting = [n for n in self._fits[door] if self._asks[n].path == path]
            numbers = [dice.choice(fitting) for _ in range(dice.randint(*LINES))]
            lines = {secrets.token_hex(8): Line(number) for number in numbers}
            try:
                await self._submit(door, lines)
            except TimeoutError:
                return
            until = time.monotonic() + dice.uniform(*PAUSE_S)
            while go_on() and (time.monotonic() < until or len(self._open) >= OPEN):
                await self._look()
                await asyncio.sleep(AGAIN_S)

    async def finish(self) -> None:
        """Until all have ended, when all is quiet; then each line must have had its result."""
        until = time.monotonic() + DONE_S
        while self._open and time.monotonic() < until:
            await self._look()
            await asyncio.sleep(AGAIN_S)
        # An answer that is there twice may still come.
        await self._pull()
        for sent in self._sent:
            for name, line in sent.lines.items():
                if len(line.results) + line.refused != 1:
                    found = f"{len(line.results)} answers and {line.refused} errors"
                    self._weather.violation(f"a line of {sent.door} has {found}", batch=sent.id, line=name)
        self.counts["batches"] = len(self._sent)

    def check(self, entries: Sequence[Entry], *, alone: bool) -> None:
        """Holds the entries of batches against their lines. ``alone``: there are no other batches."""
        found: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry.batch:
                found.setdefault(entry.batch, []).append(entry)
        self.counts["entries"] = sum(map(len, found.values()))
        answered: dict[str, list[Seen]] = {}
        for sent in self._sent:
            answered.setdefault(sent.id, []).extend(seen for line in sent.lines.values() for seen in line.results)
        for id, answers in answered.items():
            for problem in _problems(answers, found.pop(id, [])):
                self._weather.violation(f"ledger: {problem}", batch=id)
        for id in found if alone else ():
            self._weather.violation("ledger: nobody has sent this batch", batch=id)

    # -- submitting

    async def _submit(self, door: str, lines: dict[str, Line]) -> None:
        bodies = {name: _whole(self._asks[line.number].body) for name, line in lines.items()}
        path = self._asks[next(iter(lines.values())).number].path
        if door == "openai":
            id = await self._openai(path, bodies)
        elif door == "workers-ai":
            listed = [{**body, "external_reference": name} for name, body in bodies.items()]
            id = (await self._insist(f"{path}?queueRequest=true", json={"requests": listed}))["result"]["request_id"]
        else:
            id = await self._push(bodies)
        sent = Sent(door, id, lines, path)
        self._sent.append(sent)
        self._open.append(sent)
        self.counts[f"lines by {door}"] += len(lines)

    async def _openai(self, path: str, bodies: dict[str, dict[str, Any]]) -> str:
        rows = [{"custom_id": name, "method": "POST", "url": path, "body": body} for name, body in bodies.items()]
        data = "\n".join(map(json.dumps, rows)).encode()
        form = {"files": {"file": ("in.jsonl", data, "application/jsonl")}, "data": {"purpose": "batch"}}
        file = await self._insist("/v1/files", **form)
        asked = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        made = await self._insist("/v1/batches", json=asked)
        return str(made["id"]).removeprefix("batch_")

    async def _push(self, bodies: dict[str, dict[str, Any]]) -> str:
        if not self._queues:
            for name in ("asks", "answers"):
                queue = await self._insist(f"{TOP}/queues", json={"queue_name": f"chaos-{name}"})
                self._queues[name] = queue["result"]["queue_id"]
            bound = {"type": "workers_ai", "model": MODEL, "results_queue": "chaos-answers"}
            await self._insist(f"{TOP}/queues/{self._queues['asks']}/consumers", json=bound)
        messages = [{"body": {**body, "external_reference": name}} for name, body in bodies.items()]
        asks = self._queues["asks"]
        await self._insist(f"{TOP}/queues/{asks}/messages/batch", json={"messages": messages})
        return asks

    async def _insist(self, path: str, **body: Any) -> Any:
        """Sends it again under one key until it is taken. Raises `TimeoutError`."""
        headers, until = {"Idempotency-Key": secrets.token_hex(16)}, time.monotonic() + TAKEN_S
        why = ""
        while time.monotonic() < until:
            try:
                answer = await self._http.post(path, headers=headers, **body)
                if answer.is_success:
                    return answer.json()
                why = f"status {answer.status_code}: {answer.text[:200]}"
                taken = answer.status_code == 409 and "name" in answer.text
                if taken or answer.status_code not in (409, 429, 503):
                    break
            except httpx.TransportError as error:
                why = repr(error)
            self.counts["submissions sent again"] += 1
            await asyncio.sleep(AGAIN_S)
        self._weather.violation(f"a submission to {path} is not taken: {why}")
        raise TimeoutError

    # -- reading

    async def _look(self) -> None:
        for sent in list(self._open):
            if sent.door == "queue":
                await self._pull()
                over = all(line.results or line.refused for line in sent.lines.values())
            elif sent.door == "openai":
                over = await self._read_openai(sent)
            else:
                over = await self._read_native(sent)
            if over:
                self._open.remove(sent)

    async def _read_native(self, sent: Sent) -> bool:
        told = await self._get(sent.path, request_id=sent.id)
        if told is None or "responses" not in told["result"]:
            return False
        for one in told["result"]["responses"]:
            body = one if one["success"] else None
            name = one["external_reference"]
            self._result(sent, name, self._dialect(sent, name).whole, body, one.get("errors"))
        return True

    async def _read_openai(self, sent: Sent) -> bool:
        batch = await self._get(f"/v1/batches/batch_{sent.id}")
        if batch is None or batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            return False
        if batch["status"] != "completed":
            self._weather.violation(f"a batch has {batch['status']}: {batch.get('errors')}", batch=sent.id)
            return True
        files = [batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name)]
        texts = [await self._get(f"/v1/files/{file}/content", text=True) for file in files]
        if any(text is None for text in texts):
            return False
        for line in (json.loads(line) for text in texts for line in text.splitlines()):
            answer = line["response"] or {}
            good = answer.get("status_code") == 200
            read = self._dialect(sent, line["custom_id"]).whole
            self._result(sent, line["custom_id"], read, answer.get("body") if good else None, line)
        return True

    async def _pull(self) -> None:
        if (queue := self._queues.get("answers")) is None:
            return
        top = f"{TOP}/queues/{queue}/messages"
        told = await self._ask("POST", f"{top}/pull", json={"batch_size": 50, "visibility_timeout_ms": 10_000})
        messages = told.json()["result"]["messages"] if told is not None else []
        for message in messages:
            # One whose lease has ended comes again.
            if message["id"] in self._answers:
                continue
            self._answers.add(message["id"])
            body = json.loads(base64.b64decode(message["body"]))
            sent = next((one for one in self._sent if body["external_reference"] in one.lines), None)
            if sent is None:
                self._weather.violation(f"an answer that nobody has asked for: {body}"[:300])
                continue
            good = body["status"] == 200
            self._result(sent, body["external_reference"], NATIVE.whole, body if good else None, body.get("errors"))
        if messages:
            await self._ask("POST", f"{top}/ack", json={"acks": [{"lease_id": m["lease_id"]} for m in messages]})

    def _result(
        self, sent: Sent, name: str, read: Callable[[Seen, Any], None], body: Any | None, errors: object
    ) -> None:
        line = sent.lines.get(name)
        if line is None:
            self._weather.violation("a result for no line", batch=sent.id, line=name)
        elif body is None:
            line.refused += 1
            self.counts["lines refused"] += 1
            if f'"code": {HONEST}' not in json.dumps(errors) and f'"code": "{HONEST}"' not in json.dumps(errors):
                self._weather.violation(f"a line ended in {errors}"[:300], batch=sent.id)
        else:
            seen = Seen()
            read(seen, body)
            line.results.append(seen)
            self.counts["lines answered"] += 1
            if problem := seen.problem(self._wanted(line.number)):
                ask = self._asks[line.number].name
                self._weather.violation(f"WRONG, in a batch: {problem}", ask=ask, batch=sent.id)

    def _dialect(self, sent: Sent, name: str) -> Dialect:
        line = sent.lines.get(name)
        return NATIVE if line is None else self._asks[line.number].dialect

    async def _get(self, path: str, text: bool = False, **query: Any) -> Any:
        answer = await self._ask("GET", path, params=query)
        return None if answer is None else answer.text if text else answer.json()

    async def _ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """None: not now."""
        try:
            answer = await self._http.request(method, path, **more)
        except httpx.TransportError:
            return None
        if answer.status_code in (429, 503):
            return None
        if answer.is_error:
            self._weather.violation(f"a look at {path}: status {answer.status_code}: {answer.text[:200]}")
            return None
        return answer


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


def _problems(answers: list[Seen], entries: list[Entry]) -> Iterator[str]:
    """Of one batch: each answer has one entry with its tokens, and there are no others."""
    if all(seen.usage is None for seen in answers):  # these tell of no tokens
        if len(answers) != len(entries):
            yield f"{len(answers)} lines were answered and {len(entries)} are charged"
        return
    told = Counter(seen.usage for seen in answers)
    charged = Counter((entry.units.get("input_tokens", 0), entry.units.get("output_tokens", 0)) for entry in entries)
    if told != charged:
        missing, beyond = told - charged, charged - told
        yield (
            f"{len(answers)} lines were answered and {len(entries)} are charged: without entry {dict(missing)}, "
            f"without answer {dict(beyond)} (in, out)"
        )
    if states := {entry.status for entry in entries} - {"done"}:
        yield f"entries of a batch say {states}"
