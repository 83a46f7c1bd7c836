"""A batch's input on its way in: each request is checked, all are put in order, and shards are written.

Nothing of a request stays in memory but about 100 bytes: bodies wait in a temporary file. So a million requests take
less than 150 MB. Everything here blocks, in short steps that let other threads in between.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from serve_app.api.envelopes import status_of
from serve_app.api.errors import ApiError, InvalidInput, as_api_error
from serve_app.batch.apis import BatchApi, Malformed
from serve_app.batch.check import Checker, Known, NoModel
from serve_app.batch.order import levels, order, shared
from serve_app.batch.spool import Spool
from serve_app.state.blobs.files import Files
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Request, Result, Shard
from serve_app.state.errors import Away

SHARD_REQUESTS = 512
SHARD_BYTES = 1 << 20
# How many of what is wrong are told one by one.
MAX_PROBLEMS = 1000
# After so many requests other threads come first.
STEP = 32
_ARRAY = b"\xdd"


@dataclass(slots=True, frozen=True)
class Problem:
    """What is wrong with a request that can't be one at all. ``line``: from 1; None: it is about all of them."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(slots=True, frozen=True)
class Refusal:
    """``problems``: JSON, a list as `Batch.problems` has it."""

    problems: bytes

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Refusal:
        return cls(orjson.dumps([problem.shown() for problem in problems]))


@dataclass(slots=True, frozen=True)
class ShardPlan:
    """A batch that is checked and cut. ``wrong``: requests that can't be run, read from a temporary file as often as
    they are looked at. ``prompt_bytes``: of all prompts; ``shared_bytes``: how much of that the one before has too.
    """

    shards: list[Shard]
    wrong: Sequence[Result]
    total: int
    prompt_bytes: int = 0
    shared_bytes: int = 0


def too_many(most: int) -> InvalidInput:
    """Of a batch with more than ``most`` requests."""
    return InvalidInput(f"A batch has at most {most} requests; send several batches.", param="requests")


class _Wrong(Sequence[Result]):
    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def __len__(self) -> int:
        return len(self._spool)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return msgspec.msgpack.decode(self._spool.get(index), type=Result)


class Intake:
    """Takes the requests of one batch, and plans it. ``most``: how many there may be."""

    def __init__(self, api: BatchApi, known: Known, caller: Caller, *, most: int) -> None:
        self._api = api
        self._checker = Checker(known, caller)
        self._most = most
        self._spool = Spool()
        self._wrong = Spool()
        # What spoils the batch, and what is wrong with single requests of it.
        self._problems: list[Problem] = []
        self._left_out = 0
        self._faults: list[Problem] = []
        self._models = array("H")
        self._names: dict[str, int] = {}
        self.prompt_bytes = 0
        self._rows = bytearray()
        self._ids = array("q")
        self._id_lines = array("I")
        self.total = 0

    @property
    def problems(self) -> list[Problem]:
        """What is wrong so far, the first thousand; with a last one that counts the rest."""
        if not self._left_out:
            return self._problems
        return [*self._problems, Problem("too_many_errors", f"{self._left_out} more are wrong.")]

    @property
    def faults(self) -> list[Problem]:
        """What is wrong with single requests so far, the first thousand."""
        return self._faults

    @property
    def good(self) -> int:
        """Requests that can be run."""
        return len(self._spool)

    @property
    def first_model(self) -> str | None:
        return next(iter(self._names), None)

    def take(self, number: int, raw: bytes | None) -> None:
        """One request as it stands in the input; ``raw`` None: it was too long to read. Raises `InvalidInput` where it
        is one too many, and `Away`.
        """
        self.total += 1
        if self.total > self._most:
            raise too_many(self._most)
        if self.total % STEP == 0:
            time.sleep(0)
        try:
            if raw is None:
                raise Malformed("it is longer than a request may be.", "line_too_long")
            request = self._api.request(number, raw)
        except Malformed as error:
            self._malformed(number, error)
            return
        if self._api.unique:
            self._ids.append(hash(request.id))
            self._id_lines.append(number)
        try:
            checked = self._checker.check(request.url, request.body)
        except NoModel as missing:
            if self._api.strict:
                self._problem(Problem("model_not_found", missing.error.message, number + 1, "body.model"))
            else:
                self._answer(request, missing.error)
        except Away:
            raise
        except Exception as error:
            self._answer(request, as_api_error(error))
        else:
            if checked.kept:
                request = msgspec.structs.replace(request, kept=checked.kept)
            self._models.append(self._names.setdefault(checked.model.id, len(self._names)))
            self.prompt_bytes += checked.prompt
            self._rows += checked.begins
            self._spool.add(msgspec.msgpack.encode(request))

    def _malformed(self, number: int, error: Malformed) -> None:
        if self._api.strict:
            self._problem(Problem(error.code, str(error), number + 1, error.param))
        else:
            self._answer(Request(number, None, "", b""), InvalidInput(str(error), param=error.param))

    def _problem(self, problem: Problem) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)
        else:
            self._left_out += 1

    def _answer(self, request: Request, error: ApiError) -> None:
        """The error is the request's result."""
        body = orjson.dumps(self._api.error_body(error))
        status = status_of(error, native=self._api.native)
        self._wrong.add(msgspec.msgpack.encode(Result(request.number, request.id, "failed", status, body)))
        if len(self._faults) < MAX_PROBLEMS:
            line = request.number + (0 if self._api.native else 1)
            self._faults.append(Problem(error.name or str(error.code), error.message, line, error.param))

    def check_ids(self) -> None:
        """Finds ids that are there twice, once all requests are here."""
        ids = np.frombuffer(self._ids, np.int64) if self._ids else np.zeros(0, np.int64)
        found = np.argsort(ids, kind="stable")
        message = "custom_id: another request has this one already; each needs its own."
        for at in np.sort(found[1:][ids[found[1:]] == ids[found[:-1]]]):
            self._problem(Problem("duplicate_custom_id", message, self._id_lines[at] + 1, "custom_id"))
        self._ids, self._id_lines = array("q"), array("I")

    @property
    def models(self) -> dict[str, int]:
        """How many requests each model has."""
        counts = np.bincount(np.frombuffer(self._models, np.uint16), minlength=len(self._names)).tolist()
        return dict(zip(self._names, counts, strict=True))

    def sample(self, count: int) -> list[tuple[str, list[Any]]]:
        """The models and pieces of work of up to ``count`` requests, spread evenly over those of the input."""
        names, total = list(self._names), len(self._spool)
        found = []
        for at in range(0, total, -(-total // count)):
            request = msgspec.msgpack.decode(self._spool.get(at), type=Request)
            if pieces := self._checker.read(request.url, request.body):
                found.append((names[self._models[at]], pieces))
        return found

    def shared_bytes(self) -> int:
        """Bytes of prompts that the request before has too, in the order in which they would be run."""
        models, rows = np.frombuffer(self._models, np.uint16), levels(self._rows)
        return int(shared(order(models, rows), models, rows).sum())

    def refused(self) -> Refusal | None:
        """Why this can be no batch, once all requests are here: one of which nothing could be run is none."""
        if self._api.unique:
            self.check_ids()
        if self.total == 0:
            return Refusal.of([Problem("empty_file", "There are no requests in it.")])
        if self._problems:
            return Refusal.of(self.problems)
        if not self._spool:
            more = self.total - len(self._faults)
            rest = [Problem("too_many_errors", f"{more} more are wrong.")] if more else []
            return Refusal.of([*self._faults, *rest])
        return None

    def plan(self, files: Files, batch_id: str) -> ShardPlan | Refusal:
        """Writes the shards. Nothing is written of what is refused."""
        if (refused := self.refused()) is not None:
            return refused
        models, rows = np.frombuffer(self._models, np.uint16), levels(self._rows)
        found = order(models, rows)
        near = int(shared(found, models, rows).sum())
        return ShardPlan(
            list(self._shards(files, batch_id, found, models)),
            _Wrong(self._wrong),
            self.total,
            self.prompt_bytes,
            near,
        )

    def _shards(self, files: Files, batch_id: str, found: np.ndarray, models: np.ndarray) -> Iterator[Shard]:
        names = list(self._names)
        # Of two inputs under one id the second must not touch the shards of the first.
        prefix = f"batches/{batch_id}/shards/{secrets.token_hex(4)}-"
        for number, part in enumerate(self._parts(found, models)):
            blob = f"{prefix}{number:06}"
            files.put(blob, _ARRAY + len(part).to_bytes(4, "big") + b"".join(map(self._spool.get, part)))
            yield Shard(number, names[models[part[0]]], blob, len(part))

    def _parts(self, found: np.ndarray, models: np.ndarray) -> Iterator[list[int]]:
        part: list[int] = []
        size = 0
        for at in (at for start in range(0, len(found), 4096) for at in found[start : start + 4096].tolist()):
            length = self._spool.size(at)
            full = len(part) == SHARD_REQUESTS or size + length > SHARD_BYTES
            if part and (full or models[at] != models[part[0]]):
                yield part
                part, size = [], 0
            part.append(at)
            size += length
        if part:
            yield part

    def close(self) -> None:
        """Bodies leave the disk; what is wrong can be read as long as its plan is held."""
        self._spool.close()
