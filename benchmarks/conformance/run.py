"""Asks a server every case of the table, and says what came of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.shapes import problem
from benchmarks.conformance.table import cases

Outcome = Literal["holds", "differs", "fails"]
AT_ONCE = 4


@dataclass(slots=True, frozen=True)
class Found:
    api: str
    name: str
    outcome: Outcome
    problem: str = ""

    def json(self) -> dict[str, str]:
        return {"api": self.api, "name": self.name, "outcome": self.outcome, "problem": self.problem}


async def run(client: httpx.AsyncClient, models: Models, only: set[str] | None = None) -> list[Found]:
    """Every case of the APIs ``only`` (all of them unless given) that the models allow, in the table's order."""
    asked = [case for case in cases(models) if not only or case.api in only]
    asked = [case for case in asked if not case.needs or getattr(models, case.needs)]
    places = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> Found:
        async with places:
            return await ask(client, case)

    return list(await asyncio.gather(*(one(case) for case in asked)))


async def ask(client: httpx.AsyncClient, case: Case) -> Found:
    try:
        headers = {"Authorization": ""} if case.keyless else {}
        answer = await client.request(case.method, case.path, json=case.body, headers=headers)
        told = wrong(case, answer)
    except httpx.HTTPError as error:
        told = f"no answer: {type(error).__name__}"
    if told is None:
        return Found(case.api, case.name, "holds")
    if case.ours:
        return Found(case.api, case.name, "differs", f"{case.ours} ({told})")
    return Found(case.api, case.name, "fails", told)


def wrong(case: Case, answer: httpx.Response) -> str | None:
    """What is wrong with an answer, or None."""
    wanted = case.status if isinstance(case.status, tuple) else (case.status,)
    if answer.status_code not in wanted:
        return f"status {answer.status_code} instead of {' or '.join(map(str, wanted))}: {answer.text[:120]}"
    for name, begins in case.headers.items():
        if not answer.headers.get(name, "").startswith(begins):
            return f"header {name} is {answer.headers.get(name)!r}, which does not begin with {begins!r}"
    if case.parts is not None:
        try:
            return case.parts(lines_of(answer.text) if case.lines else events_of(answer.text))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return f"the stream cannot be read: {type(error).__name__}: {error}"
    if case.shape is None:
        return None
    try:
        body = answer.json()
    except ValueError:
        return "the body is not JSON"
    return problem(body, case.shape)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Server-sent events; data that is not JSON (``[DONE]``) stays text."""
    found: list[tuple[str, Any]] = []
    for block in text.split("\n\n"):
        name, data = "", None
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data is not None:
            found.append((name, json.loads(data) if data[:1] in "{[" and data != "[DONE]" else data))
    return found


def lines_of(text: str) -> list[tuple[str, Any]]:
    return [("", json.loads(line)) for line in text.splitlines()]
