"""What a machine has too little of to serve well, told at the start with what to do about it.

Nothing here refuses a start: what is said is slow or may run out, and works otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app import memory
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import Catalog
from serve_app.catalog.need import of_stage, said
from serve_app.config import Settings
from serve_app.kernels.library.build import BuildError, find_compiler

# What Ray's daemons, Serve's controller, HAProxy, the process that workers are forked from and the gateway hold, and
# what each replica does beside its worker. Measured with the local profile: 927 MiB, and 41 to 45 MiB.
BASE_BYTES, REPLICA_BYTES = 950 << 20, 45 << 20
# An object store that still keeps many prompts of small models.
SMALL_STORE_BYTES = 256 << 20
# Of suggested budgets. They count no replicas, and this is less than one: what fits before rounding does so after.
_STEP_BYTES = 32 << 20
_CGROUP = Path("/sys/fs/cgroup")
# Processor time that a container may take, and of which period, in cgroups' second and first version.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


@dataclass(slots=True, frozen=True)
class ModelNeed:
    """Bytes of a model's replicas on CPUs and their workers. ``kept``: of those that never sleep, as much as they are
    likely to hold; ``least``: what the largest of the others takes at least, by turns; ``all``: all of them, likely.
    """

    id: str
    kept: int
    least: int
    all: int


def warnings(settings: Settings, catalog: Catalog) -> list[str]:
    """One line each, for the models that are going to be started."""
    needs, on_cpus = _needs(settings, catalog)
    found = [no_compiler() if on_cpus else None, one_core(usable_cores())]
    total = memory.total_bytes()
    if total is not None:
        found.append(little_memory(total, settings.object_store_bytes, settings.memory_budget or 0, needs))
    return [line for line in found if line is not None]


def no_compiler() -> str | None:
    """Kernels are compiled where they run, and each worker's log says so too late."""
    if os.environ.get("SERVE_APP_KERNELS") == "torch":  # asked for
        return None
    try:
        find_compiler()
    except BuildError:
        return (
            "there is no C++ compiler, so models compute with torch's own operators: the same answers, several times "
            "slower. Install one (apt install g++, dnf install gcc-c++) or set CXX, and start again"
        )
    return None


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: those that it is bound to, or fewer where its container gets less time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in _QUOTAS:
        try:
            quota, period = map(int, " ".join((cgroup / file).read_text() for file in files).split())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if quota > 0 < period:
            return max(1, min(bound, math.ceil(quota / period)))
    return bound


def one_core(cores: int) -> str | None:
    if cores > 1:
        return None
    return (
        "there is one processor core: models, the gateway and Ray take turns on it, so a start takes longer and "
        "requests at the same time slow each other. Give the server two cores, or start fewer models (SERVE_APP_MODELS)"
    )


def little_memory(total: int, store: int, budget: int, needs: Sequence[ModelNeed]) -> str | None:
    """``total``: bytes of the machine; ``store``: of the object store; ``budget``: what the operator lets all workers
    hold together, or 0.
    """
    room, wanted = workers_room(total, store), sum(need.all for need in needs)
    if min(wanted, budget or wanted) <= room:
        return None
    if budget:
        return (
            f"SERVE_APP_MEMORY_BUDGET is {said(budget)}, but of {said(total)} of memory only {said(max(0, room))} are "
            f"left beside Ray, the gateway and an object store of {said(store)}: lower it, or "
            "SERVE_APP_OBJECT_STORE_BYTES"
        )
    remedy = []
    if store > SMALL_STORE_BYTES and len(fitting(needs, room)) < len(needs):
        room = workers_room(total, SMALL_STORE_BYTES)
        remedy.append(f"SERVE_APP_OBJECT_STORE_BYTES={_setting(SMALL_STORE_BYTES)}")
    little = f"there are {said(total)} of memory, and workers of all models hold {said(wanted)} when all are in use"
    fit = fitting(needs, room)
    if not fit:
        return f"{little}. No model fits: take a larger machine, or one record of your own with a lower kv_cache_bytes"
    without = ", ".join(need.id for need in needs if need.id not in fit)
    if without:
        remedy.append(f"SERVE_APP_MODELS={','.join(fit)}")
    remedy.append(f"SERVE_APP_MEMORY_BUDGET={_setting(room)}")
    return f"{little}: Ray ends some when memory runs out. They take turns after a start with {' '.join(remedy)}" + (
        f", which leaves out {without}" if without else ""
    )


def workers_room(total: int, store: int) -> int:
    """Bytes that replicas and workers may hold together before Ray ends one of them; below 0: not even Ray has
    enough.
    """
    return int(total * memory.RAY_ENDS_AT) - min(memory.MARGIN_BYTES, total // 50) - BASE_BYTES - store


def fitting(needs: Sequence[ModelNeed], room: int) -> list[str]:
    """Ids of the models that a budget of ``room`` serves, in the order of ``needs``: first those that never sleep, as
    many as fit beside each other, and of the others each that fits by itself beside those.
    """
    found = set()
    for need in needs:
        if need.kept and need.kept + need.least <= room:
            room -= need.kept
            found.add(need.id)
    found |= {need.id for need in needs if not need.kept and need.least <= room}
    return [need.id for need in needs if need.id in found]


def _needs(settings: Settings, catalog: Catalog) -> tuple[list[ModelNeed], bool]:
    """Of the models that are started, as far as their weights have been fetched, those first that a start begins with;
    and whether any of them computes on CPUs.
    """
    found, on_cpus = [], False
    started = catalog.started(settings.profile, settings.models)
    for record, profile in sorted(started, key=lambda pair: not pair[0].task_declaration.starts_first):
        kept = least = every = 0
        for name, stage in profile.stages.items():
            if stage.num_gpus:
                continue
            on_cpus = True
            try:
                need = of_stage(record, name, stage, settings.home, catalog.source(record.id))
            except CatalogError:  # its worker says so
                continue
            likely = (need.likely or need.least) + REPLICA_BYTES
            kept += stage.min_replicas * likely
            every += max(1, stage.min_replicas) * likely
            if not stage.min_replicas:
                least = max(least, need.least + REPLICA_BYTES)
        found.append(ModelNeed(record.id, kept, least, every))
    return found, on_cpus


def _setting(count: int) -> str:
    """Bytes as settings take them, rounded down."""
    return f"{count // _STEP_BYTES * (_STEP_BYTES >> 20)}MiB"
