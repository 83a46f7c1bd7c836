"""The faults: each a row of :data:`FAULTS` that says what it does and what clients may see of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.chaos import network
from benchmarks.chaos.asks import DETECTOR
from benchmarks.chaos.injections import (
    BURN_CPU,
    HOLD_MEMORY,
    WRITE_DISK,
    Inject,
    all_killed,
    beside,
    by_hand,
    clock_jumps,
    cut,
    damaged,
    disk_full,
    home_read_only,
    killed,
    late,
    lossy,
    named,
    owner,
    server_lost,
    stopped,
    store,
    store_full,
    store_killed,
    store_locked,
    token_deleted,
    workers,
)  # fmt: skip
from benchmarks.chaos.target import DECODERS, GATEWAY, REPLICA, RUNNER, WORKERS, Target
from benchmarks.chaos.weather import BROKEN, REFUSED, UNSTORED

RECOVERS_S, GATEWAY_S, RESTART_S = 5.0, 60.0, 180.0
# What had begun to fail when the service was back.
FADES_S = 1.0

# Nothing but a pause may be seen; or honest refusals; or broken connections as well.
PAUSE: frozenset[str] = frozenset()
REFUSALS = frozenset({REFUSED})
NO_STORE = frozenset({UNSTORED})
ANYTHING = frozenset({REFUSED, BROKEN})


@dataclass(slots=True, frozen=True)
class Fault:
    """``hold``: seconds that it lasts, from and to. ``stalls``: nothing can be answered meanwhile. ``recovers_s``:
    until every model answers, from its end if it stalls and else from its begin. ``needs``: why it cannot be had here.
    ``alone``: no other comes beside it. ``fades_s``: how long behind its end something of it may be seen.
    """

    name: str
    does: str
    inject: Inject
    allowed: frozenset[str] = PAUSE
    hold: tuple[float, float] = (0.0, 0.0)
    stalls: bool = False
    recovers_s: float = RECOVERS_S
    needs: Callable[[Target], str | None] = lambda target: None
    alone: bool = False
    fades_s: float = FADES_S


# -- why a fault cannot be had ---------------------------------------------------------------------------------------


def _no_root(target: Target) -> str | None:
    return "root writes everywhere: run it as another user" if os.getuid() == 0 else None


def _no_server(target: Target) -> str | None:
    return "only for a server that chaos has started" if target.server is None else None


def _no_sqlite(target: Target) -> str | None:
    return None if target.store is None and (target.home / "state.sqlite3").exists() else "the store is PostgreSQL"


def _no_postgres(target: Target) -> str | None:
    return None if target.store is not None else "needs --database with a PostgreSQL"


def _no_lost_postgres(target: Target) -> str | None:
    return _no_postgres(target) or _no_sockets(target)


def _no_postgres_of_ours(target: Target) -> str | None:
    return None if target.postgresql is not None else "needs --postgresql, which starts one"


def _no_small_tasks(target: Target) -> str | None:
    return "only a server that chaos has started is asked for small tasks" if target.server is None else None


def _no_other_gateway(target: Target) -> str | None:
    return "there is one gateway: use --gateways 2" if target.gateways < 2 else None


def _no_clock(target: Target) -> str | None:
    return "the clock of this server cannot be moved" if target.clock is None else None


def _no_sockets(target: Target) -> str | None:
    return network.can_reach_sockets()


GATEWAYS, HAPROXY, POOL = named(GATEWAY), named("haproxy"), named("ray::KVPool")
RUNNERS, PREDICTORS = named(RUNNER), named("ray::PredictorWorker")
CHAT_REPLICA = f"{REPLICA}pico--pico-instruct:"
REPLICAS, ALL_WORKERS = named(REPLICA), named(*WORKERS)
STORE_USERS = named(GATEWAY, RUNNER)
SHORT, LONG = (1.0, 4.0), (4.0, 9.0)

FAULTS = (
    Fault("decode-killed", "kill -9 of a decode worker", killed(workers("decode"))),
    Fault("prefill-killed", "kill -9 of a prefill worker", killed(workers("prefill"))),
    Fault("draft-killed", "kill -9 of a draft worker", killed(named("ray::DraftWorker"))),
    Fault("encoder-killed", "kill -9 of a worker of embeddings or reranking", killed(named("ray::EncoderWorker"))),
    Fault("decode-replica-killed", "kill -9 of a decode replica", killed(named(f"{CHAT_REPLICA}Decode"))),
    Fault("prefill-replica-killed", "kill -9 of a prefill replica", killed(named(f"{CHAT_REPLICA}Prefill"))),
    Fault("draft-replica-killed", "kill -9 of a draft replica", killed(named(f"{CHAT_REPLICA}Draft"))),
    Fault("pool-killed", "kill -9 of the node's KV pool", killed(POOL)),
    Fault("controller-killed", "kill -9 of Serve's controller", killed(named("ray::ServeController"))),
    Fault("gateway-killed", "kill -9 of the gateway", killed(GATEWAYS), ANYTHING, recovers_s=GATEWAY_S),
    Fault("runner-killed", "kill -9 of what runs batches", killed(RUNNERS)),
    Fault("haproxy-killed", "kill -9 of HAProxy", killed(HAPROXY), ANYTHING),
    Fault("decode-stopped", "a decode worker hangs", stopped(workers("decode")), hold=LONG),
    Fault("prefill-stopped", "a prefill worker hangs", stopped(workers("prefill")), hold=LONG),
    Fault("draft-stopped", "a draft worker hangs", stopped(named("ray::DraftWorker")), hold=LONG),
    Fault("encoder-stopped", "a worker of embeddings or reranking hangs", stopped(named("ray::EncoderWorker")),
          hold=SHORT, stalls=True),
    Fault("replica-stopped", "a replica hangs", stopped(REPLICAS), hold=SHORT, stalls=True),
    Fault("predictor-killed", "kill -9 of a worker of a small task", killed(PREDICTORS), needs=_no_small_tasks),
    Fault("predictor-stopped", "a worker of a small task hangs", stopped(PREDICTORS), hold=SHORT, stalls=True,
          needs=_no_small_tasks),
    Fault("decoder-killed", "kill -9 of what decodes files", all_killed(named(*DECODERS)), needs=_no_small_tasks),
    Fault("decoder-stopped", "what decodes files hangs", stopped(named(*DECODERS)), hold=SHORT, stalls=True,
          needs=_no_small_tasks),
    # Starting a model again is a start, not a recovery.
    Fault("model-by-hand", "an operator stops a model and starts it again", by_hand(DETECTOR), hold=SHORT,
          recovers_s=GATEWAY_S, needs=_no_small_tasks),
    Fault("owner-killed", "kill -9 of the gateway that owns dispatch", killed(owner), ANYTHING, recovers_s=GATEWAY_S,
          needs=_no_other_gateway),
    Fault("owner-stopped", "the gateway that owns dispatch hangs", stopped(owner), ANYTHING, LONG, True, GATEWAY_S,
          needs=_no_other_gateway),
    Fault("pool-stopped", "the node's KV pool hangs", stopped(POOL), hold=SHORT),
    Fault("gateway-stopped", "the gateway hangs", stopped(GATEWAYS), ANYTHING, SHORT, True, GATEWAY_S),
    # It may hold SQLite's lock meanwhile.
    Fault("runner-stopped", "what runs batches hangs", stopped(RUNNERS), NO_STORE, hold=LONG),
    Fault("haproxy-stopped", "HAProxy hangs", stopped(HAPROXY), ANYTHING, SHORT, True),
    Fault("controller-stopped", "Serve's controller hangs", stopped(named("ray::ServeController")), hold=SHORT),
    Fault("server-lost", "kill -9 of Ray's GCS, raylet or agents, or of the server itself; then it is started again",
          server_lost, ANYTHING, stalls=True, recovers_s=RESTART_S, needs=_no_server, alone=True),
    Fault("tokens-lossy", "packets between gateway and workers are dropped", lossy(GATEWAYS, ALL_WORKERS), hold=SHORT,
          stalls=True, needs=_no_sockets),
    Fault("tokens-late", "what gateway and workers tell each other comes late", late(GATEWAYS, ALL_WORKERS), hold=SHORT,
          stalls=True, needs=_no_sockets),
    Fault("calls-late", "what gateway and replicas tell each other comes late", late(GATEWAYS, REPLICAS), hold=SHORT,
          stalls=True, needs=_no_sockets),
    Fault("workers-late", "what replicas and their workers tell each other comes late", late(REPLICAS, ALL_WORKERS),
          hold=SHORT, stalls=True, needs=_no_sockets),
    Fault("http-late", "what HAProxy and gateway tell each other comes late", late(HAPROXY, GATEWAYS), hold=SHORT,
          stalls=True, needs=_no_sockets),
    Fault("clock-jumps", "the server's wall clock is put forth or back by up to an hour, and right again", clock_jumps,
          hold=LONG, needs=_no_clock),
    Fault("tokens-cut", "connections between gateway and workers end", cut(GATEWAYS, ALL_WORKERS), needs=_no_sockets),
    Fault("calls-lossy", "packets between gateway and replicas are dropped", lossy(GATEWAYS, REPLICAS), hold=SHORT,
          stalls=True, needs=_no_sockets),
    Fault("calls-cut", "connections between gateway and replicas end", cut(GATEWAYS, REPLICAS), needs=_no_sockets),
    Fault("workers-lossy", "packets between replicas and their workers are dropped", lossy(REPLICAS, ALL_WORKERS),
          hold=SHORT, stalls=True, needs=_no_sockets),
    Fault("http-lossy", "packets between HAProxy and gateway are dropped", lossy(HAPROXY, GATEWAYS), hold=SHORT,
          stalls=True, needs=_no_sockets),
    Fault("store-locked", "another process holds SQLite's lock", store_locked, NO_STORE, hold=SHORT, needs=_no_sqlite),
    Fault("store-refuses", "PostgreSQL's port hangs up", store("refuse"), NO_STORE, hold=LONG, needs=_no_postgres),
    Fault("store-silent", "PostgreSQL does not answer", store("silent"), NO_STORE, hold=LONG, needs=_no_postgres),
    Fault("store-killed", "kill -9 of PostgreSQL, which is then started again", store_killed, NO_STORE, hold=SHORT,
          needs=_no_postgres_of_ours),
    Fault("store-slow", "every packet from and to PostgreSQL is late", store("slow"), NO_STORE,
          hold=SHORT, needs=_no_postgres),
    # What hung on the connections is free again when PostgreSQL has ended the transactions that nobody goes on with.
    Fault("store-lost", "packets between PostgreSQL and who uses it are dropped, and it never hears of the end",
          lossy(STORE_USERS, lambda _: [os.getpid()]), NO_STORE, hold=LONG, needs=_no_lost_postgres, fades_s=7.0),
    Fault("gateway-disk-full", "the gateway can write no file", disk_full(GATEWAYS), REFUSALS, SHORT, True),
    Fault("workers-disk-full", "workers can write no file", disk_full(ALL_WORKERS), hold=SHORT),
    Fault("store-disk-full", "PostgreSQL can write no file", store_full, NO_STORE, hold=SHORT,
          needs=_no_postgres_of_ours),
    Fault("pool-disk-full", "the KV pool can write no file", disk_full(POOL), hold=SHORT),
    Fault("home-read-only", "the state directory is read-only", home_read_only, NO_STORE, hold=SHORT, needs=_no_root),
    Fault("cache-damaged", "files of the KV cache are changed, cut and deleted", damaged("kv/*/??/*.kv")),
    Fault("adapters-damaged", "workers' copies of adapters are changed, cut and deleted",
          damaged("adapters/*.json", "adapters/packed/*/*")),
    Fault("checks-damaged", "what starts have found out about weights is changed, cut and deleted",
          damaged("checks/*.json")),
    Fault("token-deleted", "Ray's token is deleted", token_deleted, hold=SHORT),
    Fault("memory-short", "another process holds up to 2 GiB of memory, 25 % of the machine's stay free",
          beside(HOLD_MEMORY), hold=SHORT),
    Fault("cpu-busy", "other processes compute", beside(BURN_CPU, BURN_CPU), hold=SHORT, stalls=True),
    Fault("disk-busy", "another process writes through to the disk", beside(WRITE_DISK), NO_STORE,
          hold=SHORT, stalls=True),
)  # fmt: skip


# `kill -9` of gateways, workers, replicas and PostgreSQL. What is named more than once comes more often.
KILLS = (
    *("gateway-killed", "store-killed", "decode-killed") * 2,
    *("gateway-killed", "store-killed", "prefill-killed", "draft-killed", "encoder-killed"),
    *("decode-replica-killed", "prefill-replica-killed", "draft-replica-killed"),
)


def selected(names: str) -> list[Fault]:
    """``all``, ``none``, ``kills``, names with commas, or ``all,-NAME`` for all but some. Raises :class:`SystemExit`
    for an unknown one.
    """
    known = {fault.name: fault for fault in FAULTS}
    if names == "kills":
        return [known[name] for name in KILLS]
    chosen: dict[str, Fault] = {}
    for word in names.split(","):
        if word == "all":
            chosen |= known
        elif word.removeprefix("-") not in (*known, "none"):
            raise SystemExit(f"no such fault: {word}; --list shows all")
        elif word.startswith("-"):
            chosen.pop(word[1:], None)
        elif word != "none":
            chosen[word] = known[word]
    return list(chosen.values())
