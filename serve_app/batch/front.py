"""Batches as a gateway takes them in and shows them, whatever their API."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import orjson

from serve_app.api.errors import InvalidInput, OutOfCapacity, Stopped, StoreAway
from serve_app.batch.apis import BatchApi
from serve_app.batch.check import Known
from serve_app.batch.intake import Intake, Refusal, ShardPlan
from serve_app.batch.results import line, lines
from serve_app.batch.retry import retried
from serve_app.batch.sheet import Sheet, Terms
from serve_app.state.blobs.files import Files
from serve_app.state.blobs.uploads import Upload, UploadStore
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import ENDED, Batch, BatchStore, Counts
from serve_app.state.errors import Away, QueueFull

# For so long whoever checks an input inline has it to itself. Less than `AHEAD_S` of the store's tables, beyond which
# the store takes a claim for one of a clock that was put back.
CHECK_S = 45.0
# Lines of results that are read at a time.
PAGE = 256
THREADS = 32
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Batches:
    """All methods raise `StoreAway`."""

    def __init__(
        self,
        store: BatchStore,
        uploads: UploadStore,
        files: Callable[[], Files],
        known: Known,
        terms: Terms,
        owner: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.uploads = uploads
        self.files = files
        self.known = known
        self.terms = terms
        self._owner = f"gateway-{owner}"
        self._wake = wake
        # Uploads hold a thread as long as their clients send.
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")
        # One input is checked at a time: it takes a processor as long as it takes.
        self._checking = asyncio.Lock()

    async def aside(self, do: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """``do`` off the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, partial(do, *args, **kwargs))
        except Away as error:
            raise StoreAway from error
        except QueueFull as error:
            raise OutOfCapacity(f"{error} Wait until some are done.", retry_after=60.0) from None

    async def submit(self, sheet: Sheet, api: BatchApi, items: Sequence[bytes], most: int | None = None) -> Batch:
        """A batch whose requests are here: checked, cut and in the queue when this returns. Raises `InvalidInput` for
        one that can't be, naming each bad request by number.
        """
        async with self._checking:
            made = await self.aside(self.submit_now, sheet, api, items, most)
        self._wake()
        return made

    def submit_now(self, sheet: Sheet, api: BatchApi, items: Sequence[bytes], most: int | None = None) -> Batch:
        """:meth:`submit`. Blocks."""
        account = sheet.caller.account
        if (there := self.store.find(account, sheet.id)) is not None:
            return there
        files = self.files()
        with closing(Intake(api, self.known, sheet.caller, most=most or self.known.most)) as intake:
            for number, item in enumerate(items):
                intake.take(number, item)
            plan = self._plan(sheet, intake)
        # What somebody else needs who goes on with it, and who wants what has failed to be run again.
        blob = f"batches/{sheet.id}/input-{uuid.uuid4().hex}.json"
        try:
            files.put(blob, b'{"requests":[' + b",".join(items) + b"]}")
        except BaseException:
            self._drop_shards(plan)
            raise
        made = self._planned(sheet, plan, blob)
        if made.input != blob:
            files.delete(blob)
        return made

    async def take_in(self, sheet: Sheet, intake: Intake, blob: str) -> Batch:
        """:meth:`accept` of a batch whose requests ``intake`` has taken, all of them: it is in the queue when this
        returns.
        """
        made = await self.aside(self._take_in, sheet, intake, blob)
        self._wake()
        return made

    def _take_in(self, sheet: Sheet, intake: Intake, blob: str) -> Batch:
        if (there := self.store.find(sheet.caller.account, sheet.id)) is not None:
            return there
        return self._planned(sheet, self._plan(sheet, intake), blob)

    def _plan(self, sheet: Sheet, intake: Intake) -> ShardPlan:
        plan = intake.plan(self.files(), sheet.id)
        if isinstance(plan, Refusal):
            raise refusal(plan)
        return plan

    def _planned(self, sheet: Sheet, plan: ShardPlan, blob: str) -> Batch:
        """The batch, or the one that was there already. Where the store does not answer it may have taken it all the
        same, and whoever runs it needs its bytes: what belongs to nothing in the end is swept.
        """
        now = time.time()
        batch = replace(self._new(sheet, now, plan.total), input=blob)
        try:
            self.store.create(batch, self._owner, now + CHECK_S)
        except ValueError:  # sent twice at the same time under one key
            self._drop_shards(plan)
            return self.store.find(sheet.caller.account, sheet.id) or batch
        planned = self.store.planned(self._owner, sheet.id, plan.shards, plan.wrong, time.time())
        found = self.store.find(sheet.caller.account, sheet.id) or batch
        if not planned:
            self._drop_shards(plan)
            if found.status in ("cancelling", "cancelled"):
                raise Stopped("The batch was cancelled while it was taken in.")
            # It took too long, and a runner has it by now.
        return found

    def _drop_shards(self, plan: ShardPlan) -> None:
        for shard in plan.shards:
            self.files().delete(shard.blob)

    async def accept(self, sheet: Sheet, blob: str, total: int = 0) -> Batch:
        """A batch whose input lies in ``blob``, and is checked by whoever runs it."""
        made = await self.aside(self.accept_now, sheet, blob, total)
        self._wake()
        return made

    def accept_now(self, sheet: Sheet, blob: str, total: int = 0) -> Batch:
        """:meth:`accept`. Blocks."""
        batch = replace(self._new(sheet, time.time(), total), input=blob)
        try:
            self.store.create(batch)
        except ValueError:
            return self.store.find(sheet.caller.account, sheet.id) or batch
        return batch

    def _new(self, sheet: Sheet, now: float, total: int) -> Batch:
        keep_s = self.terms.keep_s if sheet.keep_s is None else sheet.keep_s
        deadline = now + self.terms.hours * 3600
        about = orjson.dumps({"id": sheet.id, **sheet.about})
        return Batch(sheet.id, sheet.door, sheet.caller, now, deadline, keep_s, about=about, counts=Counts(total))

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def find(self, account: str, batch: str) -> Batch | None:
        return await self.aside(self.store.find, account, batch)

    async def page(
        self, account: str, doors: Collection[str], *, after: str = "", before: str = "", limit: int
    ) -> tuple[list[Batch], bool]:
        """Batches, and whether there are more."""
        found = await self.aside(self.store.page, account, doors, after=after, before=before, limit=limit + 1)
        if len(found) <= limit:
            return found, False
        return (found[1:] if before and not after else found[:limit]), True

    async def cancel(self, account: str, batch: str) -> Batch | None:
        found = await self.aside(self.store.cancel, account, batch, time.time())
        self._wake()
        return found

    async def retry(self, batch: Batch, caller: Caller) -> Batch:
        """What did not succeed, as a new batch. Raises `InvalidInput` where all has, and `Gone` where the requests are
        no longer there.
        """
        async with self._checking:
            made = await self.aside(retried, self, batch, caller)
        self._wake()
        return made

    async def delete(self, batch: Batch) -> bool:
        """Forgets a batch that has ended, with all its bytes."""
        return await self.aside(self._delete, batch)

    def _delete(self, batch: Batch) -> bool:
        if batch.status not in ENDED:
            return False
        files = self.files()
        for name in files.list(f"batches/{batch.id}/"):
            files.delete(name)
        self.store.clear(batch.id)
        return self.store.delete(batch.caller.account, batch.id) is not None

    async def results(self, batch: Batch, errors: bool = False) -> AsyncIterator[bytes]:
        """Lines of what there is, in pieces: of the files of one that has ended, otherwise from the store."""
        pieces = self._pieces(batch, errors)
        while (piece := await self.aside(next, pieces, b"")) != b"":
            yield piece

    def _pieces(self, batch: Batch, errors: bool) -> Iterator[bytes]:
        if batch.status in ENDED:
            name = batch.errors if errors else batch.output
            if name:
                yield from self.files().stream(name)
            return
        after = -1
        while found := self.store.results(batch.id, after, PAGE):
            after = found[-1].number
            if piece := b"".join(lines(batch, found, errors=errors)):
                yield piece

    async def follow(self, batch: Batch, after: int) -> list[tuple[int, bytes]]:
        """Results behind the request ``after`` of a batch under way: numbers and lines."""
        found = await self.aside(self.store.results, batch.id, after, PAGE)
        return [(result.number, line(batch, result)) for result in found]

    async def upload(self, upload: Upload) -> Upload:
        return await self.aside(self.uploads.add, upload)

    async def file(self, account: str, upload_id: str) -> Upload | None:
        return await self.aside(self.uploads.find, account, upload_id, time.time())

    async def files_page(self, account: str, **how: Any) -> list[Upload]:
        return await self.aside(self.uploads.page, account, time.time(), **how)

    async def drop(self, upload: Upload) -> None:
        """Deletes a file. That of a batch's results is the batch's no more."""

        def dropped() -> None:
            self.files().delete(upload.blob)
            self.uploads.delete(upload.account, upload.id)

        await self.aside(dropped)


def refusal(found: Refusal, limit: int = 20) -> InvalidInput:
    """Why a batch is refused, with the first of what is wrong."""
    told = orjson.loads(found.problems)
    named = [
        f"request {problem['line']}: {problem['message']}" if problem["line"] is not None else problem["message"]
        for problem in told
    ]
    more = f" And {len(named) - limit} more." if len(named) > limit else ""
    first = told[0]["param"] if told else None
    return InvalidInput(f"The batch is wrong: {' '.join(named[:limit])}{more}", param=first)
