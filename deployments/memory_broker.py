"""MemoryBroker: one actor per node that says which workers are up while not all fit the memory budget.

It lets by :mod:`serve_app.routing.memory`, and measures what workers hold. Replicas tell it of themselves again and
again (:mod:`deployments.tenancy`), so that one which has been lost knows all of them a moment after it is back; workers
that are up stay up meanwhile. What workers have been seen to hold is remembered across restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from serve_app import logs, memory
from serve_app.catalog.need import REMEDY, said
from serve_app.ray_private.node_actors import NAMESPACE, leaving, may_go, of_node
from serve_app.routing import memory as policy
from serve_app.routing.memory import Room, Tenant, decide, never_fits
from serve_app.wire.memory import ASLEEP, CLOSE, GOING, LEAVE, NEVER, UP, Resident, TurnTold, read_resident

log = logging.getLogger("ray.serve")

PREFIX = "memory:"
# Between two looks for brokers of other nodes.
NAMES_S = 10.0
# How often it is looked whether somebody can come up.
LOOK_S = 0.25
# A replica's call is held so long if there is nothing new.
HOLD_S = 1.0
# By then every replica has told a broker of itself that has just come back.
GRACE_S = 3.0
# A replica that has told nothing for so long is gone, if its process is.
SILENT_S = 3.0
# Between two measurements of a worker that is in use, and of one that is not.
SAMPLE_S, IDLE_SAMPLE_S = 2.0, 15.0
# What a worker takes beyond what it has been seen to hold.
MARGIN_BYTES = 16 << 20
# A change that is worth writing down.
WORTH_BYTES = 4 << 20
MOST_REMEMBERED = 1000


@dataclass(slots=True)
class Lodger:
    """One replica's worker as the broker knows it."""

    told: Resident
    seen_at: float
    granted: bool = False
    leaving: bool = False
    closed: bool = False
    asked_at: float | None = None
    used_at: float = 0.0
    ready_at: float = 0.0
    held: int = 0
    # As first measured, and the most since.
    loaded: int = 0
    peak: int = 0
    sampled_at: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryBroker:
    """``home``: where it remembers; ``gpus``: of the node."""

    def __init__(self, node_id: str, home: str, gpus: float = 0.0, *, may_leave: bool = False) -> None:
        logs.set_up("memory broker")
        self._may_leave = may_leave
        self._leaving: asyncio.Task[None] | None = None
        self._node_id, self._file = node_id, Path(home) / "memory.json"
        self._gpus = gpus
        self._budget = 0
        self._lodgers: dict[str, Lodger] = {}
        self._known = self._remembered()
        self._written = dict(self._known)
        self._waits_until = 0.0
        if ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed:
            self._waits_until = time.monotonic() + GRACE_S
        self._task: asyncio.Task[None] | None = None
        self._counts = {"wakes": 0, "sleeps": 0, "closes": 0, "losses": 0}

    async def turn(self, told: bytes) -> bytes:
        """See :class:`serve_app.wire.memory.Resident`. Answers when there is something new, or after a while."""
        resident, now = read_resident(told), time.monotonic()
        if self._task is None:
            self._task = asyncio.ensure_future(self._look_always())
            self._leaving = leaving() if self._may_leave else None
        lodger = self._lodgers.get(resident.id)
        if lodger is None:
            lodger = self._lodgers[resident.id] = Lodger(resident, now)
        if resident.number >= lodger.told.number or resident.replica_pid != lodger.told.replica_pid:
            self._note(lodger, resident, now)
        self._decide(now)
        if self._answer(lodger).state == resident.knows:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lodger.news.wait(), HOLD_S)
        lodger.news.clear()
        return self._answer(lodger).encode()

    async def shown(self) -> bytes:
        """For people who look: JSON."""
        now, tenants = time.monotonic(), {t.name: t for t in self._tenants()}
        workers = []
        for name, lodger in sorted(self._lodgers.items(), key=lambda pair: (pair[1].told.model, pair[1].told.stage)):
            resident, answer = lodger.told, self._answer(lodger)
            workers.append(
                {
                    "model": resident.model, "stage": resident.stage, "state": self._state(lodger),
                    "pinned": resident.pinned, "needs_bytes": tenants[name].need, "held_bytes": lodger.held,
                    "gpu": resident.gpu, "busy": resident.busy,
                    "idle_s": round(now - lodger.used_at, 1) if lodger.granted else None,
                    "waited_s": None if lodger.asked_at is None else round(now - lodger.asked_at, 1),
                    "why": answer.why,
                }
            )  # fmt: skip
        up = [t for t in tenants.values() if t.up]
        told = {
            "node": self._node_id, "budget_bytes": self._budget,
            "held_bytes": sum(lodger.held for lodger in self._lodgers.values()),
            "reserved_bytes": sum(t.room for t in up), "spare_bytes": memory.spare_bytes(), **self._counts,
            "workers": workers,
        }  # fmt: skip
        return json.dumps(told).encode()

    # -- inside ------------------------------------------------------------------------------------------------

    def _note(self, lodger: Lodger, resident: Resident, now: float) -> None:
        # A replica has started another worker by itself.
        self._counts["losses"] += bool(lodger.told.pid and resident.pid and lodger.told.pid != resident.pid)
        lodger.told, lodger.seen_at = resident, now
        self._budget = resident.budget
        if resident.state == ASLEEP and (lodger.leaving or lodger.closed):
            lodger.granted = lodger.leaving = lodger.closed = False
            lodger.held = lodger.peak = lodger.loaded = 0
        elif lodger.leaving and resident.state == UP:
            # A request may have been quicker.
            lodger.leaving = not (resident.busy or resident.waits or resident.idle_s < policy.IDLE_S)
        lodger.granted = lodger.granted or resident.state != ASLEEP
        if not resident.ready:
            lodger.ready_at = now
        lodger.used_at = now - resident.idle_s
        if not resident.waits or (lodger.granted and not (lodger.closed or lodger.leaving)):
            lodger.asked_at = None
        elif lodger.asked_at is None:
            lodger.asked_at = now - resident.waited_s

    def _answer(self, lodger: Lodger) -> TurnTold:
        if lodger.closed:
            return TurnTold(CLOSE, self._waited_for(lodger))
        if lodger.leaving:
            return TurnTold(LEAVE)
        if lodger.granted:
            return TurnTold(UP)
        tenants = self._tenants()
        own = next(t for t in tenants if t.name == lodger.told.id)
        # One of a kind that is up already waits until the others want less.
        if not self._has_twin(lodger) and never_fits(own, tenants, self._room()):
            return TurnTold(NEVER, self._too_large(own, tenants))
        return TurnTold(ASLEEP, self._waited_for(lodger) if lodger.asked_at is not None else "")

    def _state(self, lodger: Lodger) -> str:
        answer = self._answer(lodger).state
        if answer == UP:
            return "up" if lodger.told.ready else "starting"
        return "waiting" if answer == ASLEEP and lodger.asked_at is not None else answer

    def _waited_for(self, lodger: Lodger) -> str:
        if memory.spare_bytes() < self._need(lodger.told):
            return f"{lodger.told.model} waits for room: the machine is short of memory, whatever the budget says"
        holders = sorted({one.told.model for one in self._lodgers.values() if one.granted and one is not lodger})
        needs = f"needs {said(self._need(lodger.told))}" if not lodger.told.gpu else f"needs {lodger.told.gpu:g} GPU"
        return (
            f"{lodger.told.model} waits for room: its {lodger.told.stage} worker {needs}, and of the memory budget of "
            f"{said(self._budget)} {', '.join(holders) or 'the machine'} has too much"
        )

    def _too_large(self, own: Tenant, tenants: list[Tenant]) -> str:
        lodger = self._lodgers[own.name]
        pinned = sorted({self._lodgers[t.name].told.model for t in tenants if t.pinned and t.name != own.name})
        beside = f" beside {', '.join(pinned)}, which never sleep" if pinned else ""
        needs = f"{said(own.need)}" if not own.gpu else f"{own.gpu:g} of a GPU"
        return (
            f"{lodger.told.model} can never be up: its {lodger.told.stage} worker needs {needs}, more than the memory "
            f"budget of {said(self._budget)} has{beside}; {REMEDY}"
        )

    def _room(self) -> Room:
        # With several GPUs Ray places shares, and none of them take turns.
        return Room(self._budget, gpu=max(1.0, self._gpus), spare=memory.spare_bytes())

    def _need(self, resident: Resident) -> int:
        if resident.gpu:
            return 0
        if (known := self._known.get(resident.key)) is not None:
            return known
        most = self._alone(resident)
        # What is not known has the machine for itself once, and is known then.
        likely = resident.likely or most
        return likely if likely <= most else max(resident.least, most)

    def _alone(self, resident: Resident) -> int:
        """Bytes that a worker has when everybody sleeps who can."""
        if resident.pinned:
            return self._budget
        return self._budget - sum(
            self._need(one.told)
            for one in self._lodgers.values()
            if one.told.pinned and (one.granted or not self._has_twin(one))
        )

    def _has_twin(self, lodger: Lodger) -> bool:
        """Whether another replica of the same stage is up: its model answers without this one."""
        kind = (lodger.told.model, lodger.told.stage)
        return any(
            one.granted and (one.told.model, one.told.stage) == kind
            for one in self._lodgers.values()
            if one is not lodger
        )

    def _tenants(self) -> list[Tenant]:
        found = []
        for name, lodger in self._lodgers.items():
            told = lodger.told
            # No room is kept for one more of those that never sleep.
            more = told.pinned and not lodger.granted and self._has_twin(lodger)
            found.append(
                Tenant(
                    name, self._need(told), told.gpu, told.pinned and not more, told.optional or more,
                    up=lodger.granted, leaving=lodger.leaving or told.state == GOING, closed=lodger.closed,
                    # Who loads is waited for.
                    busy=told.busy or told.waits or (lodger.granted and not told.ready), held=lodger.held,
                    asked_at=lodger.asked_at, used_at=lodger.used_at, up_at=lodger.ready_at,
                )
            )  # fmt: skip
        return found

    def _decide(self, now: float) -> None:
        if now < self._waits_until:
            return
        moves = decide(self._tenants(), self._room(), now)
        for name in moves.wake:
            lodger = self._lodgers[name]
            lodger.granted, lodger.asked_at, lodger.ready_at = True, None, now
            self._tell("wakes", name)
        for name in moves.sleep:
            self._lodgers[name].leaving = True
            self._tell("sleeps", name)
        for name in moves.close:
            self._lodgers[name].closed = True
            self._tell("closes", name)

    def _tell(self, count: str, name: str) -> None:
        lodger = self._lodgers[name]
        self._counts[count] += 1
        lodger.news.set()
        log.info("%s %s %s within the memory budget", lodger.told.model, lodger.told.stage, count)

    async def _look_always(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                now = time.monotonic()
                self._drop(now)
                await self._sample(now)
                self._decide(time.monotonic())
                await self._remember()
            except Exception as error:  # it must go on
                log.error("the memory broker stumbled", exc_info=error)
                await asyncio.sleep(1.0)

    def _drop(self, now: float) -> None:
        """Forgets replicas that are no more, once their workers have gone."""
        for name, lodger in list(self._lodgers.items()):
            if now - lodger.seen_at < SILENT_S or _lives(lodger.told.replica_pid):
                continue
            if not (lodger.told.pid and _lives(lodger.told.pid)):
                del self._lodgers[name]

    async def _sample(self, now: float) -> None:
        for lodger in list(self._lodgers.values()):
            told = lodger.told
            if told.gpu or not (told.pid and told.ready and lodger.granted):
                continue
            idle = now - lodger.used_at > 2 * SAMPLE_S and lodger.peak > 0
            if now - lodger.sampled_at < (IDLE_SAMPLE_S if idle else SAMPLE_S):
                continue
            lodger.sampled_at = now
            found = await asyncio.to_thread(memory.read_held, told.pid)
            if not found.now or lodger.told.pid != told.pid:
                continue
            lodger.held, most = found.now * told.ranks, found.most * told.ranks
            lodger.peak, lodger.loaded = max(lodger.peak, most), lodger.loaded or most
            # What comes with use is counted from the beginning, though some of it may have come already: it keeps
            # nobody out who was seen to fit.
            grown = min(lodger.loaded + told.grows, told.likely or lodger.loaded + told.grows)
            most = max(lodger.peak, min(grown, self._alone(told) - MARGIN_BYTES))
            self._known[told.key] = max(most + MARGIN_BYTES, self._known.get(told.key, 0))

    def _remembered(self) -> dict[str, int]:
        try:
            found = json.loads(self._file.read_text())
            return {str(key): int(value) for key, value in found.items() if int(value) > 0}
        except (OSError, ValueError, TypeError, AttributeError):  # the first start, or somebody has written in it
            return {}

    async def _remember(self) -> None:
        if all(abs(self._written.get(key, 0) - value) < WORTH_BYTES for key, value in self._known.items()):
            return
        self._written = dict(self._known)
        text = json.dumps(dict(list(self._known.items())[-MOST_REMEMBERED:]), indent=0)
        try:
            await asyncio.to_thread(_write_private, self._file, text)
        except OSError as error:
            log.warning("what models take is not remembered (%s)", error)


def _write_private(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)
    os.replace(beside, file)


def _lives(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() or ["X"])[0] not in ("Z", "X")
    except OSError:
        return False


def broker_name(node_id: str) -> str:
    return f"{PREFIX}{node_id}"


def get_or_create_broker(node_id: str, home: str) -> Any:
    """Handle of the node's broker, which is started if need be. Blocks; in an event loop use a thread."""
    gpus = next((n["Resources"].get("GPU", 0.0) for n in ray.nodes() if n["NodeID"] == node_id), 0.0)
    return of_node(MemoryBroker, broker_name(node_id), node_id).remote(node_id, home, gpus, may_leave=may_go(node_id))


class Brokers:
    """Those of all nodes."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._looked_at = -NAMES_S

    async def shown(self) -> list[dict[str, Any]]:
        """What each shows; one that has just been lost is left out."""
        if time.monotonic() - self._looked_at > NAMES_S or not self._found:
            named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
            names = [n["name"] for n in named if n["namespace"] == NAMESPACE and n["name"].startswith(PREFIX)]
            self._found = {name: await asyncio.to_thread(ray.get_actor, name, NAMESPACE) for name in names}
            self._looked_at = time.monotonic()
        told = await asyncio.gather(*(b.shown.remote() for b in self._found.values()), return_exceptions=True)
        return [json.loads(one) for one in told if isinstance(one, bytes)]
