"""Tokens per second with adapters, beside the base's in the same run.

    python -m benchmarks lora [--size 0.5b] [--rank 16] [--batch 32] [--vllm PYTHON] [--rounds 3] [--json]
    python -m benchmarks lora --part even [--size 7m] [--adapters 1000] [--clients 48] [--cache-mb 256]
    python -m benchmarks lora --part upload [--home DIR] [--batch 16]

A Llama of the size with random weights, and as many adapters of the rank on all its linears but the head. Rounds
alternate between the base (no request has an adapter), one adapter for all, and a different one for each; medians are
reported, of the decode steps alone and of everything. ``--vllm`` names the Python of an environment that has vLLM,
which gets the same adapters. Then requests with an adapter each run while another thread reads and packs adapters
without a pause, which go into a place between two steps: the 99th percentile of a step beside what it is without, and
how long an adapter takes from its file to its place.

``--part even`` has as many adapters in turn as are registered, by a worker's way from files to places, of which the
memory named holds a part; and then so few that each has a place (`benchmarks/lora/even.py`). ``--part upload`` takes
the time from an upload to the first token on a running server (`benchmarks/lora/upload.py`).

Every answer has as many tokens as were asked for and is the same in every round; answers with another adapter are
others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.checks import Checks
from benchmarks.engine import checkpoint
from benchmarks.lora import upload
from benchmarks.lora.made import write_adapters, write_many
from benchmarks.serving.stack import local_stack

PROMPT = 128
# Without and with adapters that come and go: a 99th percentile of a hundred steps each.
SWAP_ROUNDS = 5


class Side:
    """One engine's process, which sleeps (SIGSTOP) except while it is asked something."""

    def __init__(self, name: str, python: str, arguments: list[str], threads: int) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(ROOT) if name == "ours" else "", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).with_name("adapter_sides.py")), name, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=ROOT if name == "ours" else "/", start_new_session=True,
        )  # fmt: skip
        self.info = self._answer()
        self._signal(signal.SIGSTOP)

    def run(self, **command: Any) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """Ends the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # vLLM's workers outlive their parent
            self._signal(signal.SIGKILL)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"no figures: {self.name} ended by itself")
        found: dict[str, Any] = json.loads(line)
        return found

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def prompts(count: int, length: int) -> list[list[int]]:
    """Distinct plain token ids, so that no prefix is shared."""
    return [[(7 * row + 13 * column) % 8000 + 10 for column in range(length)] for row in range(count)]


def workloads(batch: int) -> dict[str, list[int]]:
    """The adapter of each request, 0 for none."""
    return {"base": [0] * batch, "one": [1] * batch, "different": list(range(1, batch + 1))}


def measure(sides: list[Any], batch: int, new: int, rounds: int, length: int = PROMPT) -> dict[str, Any]:
    """Rates by side and workload, and how they stand beside the base's."""
    checks, asked = Checks(), prompts(batch, length)
    whole: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
    decode: dict[str, list[float]] = {}
    known: dict[tuple[str, str], list[list[int]]] = {}
    for number in range(-1, rounds):  # round -1 warms up
        for name, adapters in workloads(batch).items():
            for side in sides if number % 2 else reversed(sides):
                wanted = new if number >= 0 else 2
                found = side.run(prompts=asked, adapters=adapters, new=wanted, salt=f"{name}/{number}")
                lengths = [len(tokens) for tokens in found["tokens"]]
                checks.equal(f"{side.name}, {name}, lengths", lengths, [wanted] * batch)
                if number < 0:
                    continue
                if side.name == "ours":
                    before = known.setdefault((side.name, name), found["tokens"])
                    checks.equal(f"{side.name}, {name}, another round", found["tokens"], before)
                    decode.setdefault(name, []).append(found["decode_tokens"] / found["decode_s"])
                whole[side.name].setdefault(name, []).append(batch * new / found["seconds"])
        checks.require()
    base, different = known["ours", "base"], known["ours", "different"]
    changed = sum(a != b for a, b in zip(base, different, strict=True))
    checks.that("adapters", changed > batch / 2, f"{changed} of {batch} answers differ from the base's")
    checks.require()
    rates = {side: {name: statistics.median(v) for name, v in by.items()} for side, by in whole.items()}
    steps = {name: statistics.median(v) for name, v in decode.items()}
    result: dict[str, Any] = {
        "tokens_per_s": rates,
        "decode_tokens_per_s": steps,
        "share_of_base": {name: rate / rates["ours"]["base"] for name, rate in rates["ours"].items()},
        "decode_share_of_base": {name: rate / steps["base"] for name, rate in steps.items()},
    }
    if "vllm" in rates:
        result["ratio_to_vllm"] = {name: rate / rates["vllm"][name] for name, rate in rates["ours"].items()}
    return result


def swapping(side: Any, batch: int, new: int, length: int = PROMPT) -> dict[str, Any]:
    """Steps without and with adapters that come and go, in turn."""
    checks, adapters = Checks(), workloads(batch)["different"]
    steps: dict[bool, list[float]] = {False: [], True: []}
    cold: list[float] = []
    swapped = 0
    for number in range(SWAP_ROUNDS):
        answers = []
        for swaps in (False, True):
            found = side.run(
                prompts=prompts(batch, length), adapters=adapters, new=new, salt=f"swap/{number}/{swaps}", swaps=swaps
            )
            steps[swaps] += found["steps"]
            cold, swapped = cold + found["cold"], swapped + found["swapped"]
            answers.append(found["tokens"])
        checks.equal("answers while adapters come and go", *answers)
    checks.require()
    still, moving = (1e3 * float(np.percentile(steps[swaps], 99)) for swaps in (False, True))
    return {
        "swaps": swapped,
        "step_p99_ms": still,
        "step_p99_ms_while_swapping": moving,
        "p99_ratio": moving / still,
        "file_to_place_ms": 1e3 * statistics.median(cold) if cold else None,
    }


def even(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """In a process of its own, as workers have one."""
    with contextlib.redirect_stdout(sys.stderr):
        checkpoint.main([str(folder / "model"), options.size])
    write_many(folder / "model", folder / "files", options.adapters, options.rank)
    numbers = (options.adapters // 2, options.clients, options.new, options.cache_mb * 1_000_000)
    command = [sys.executable, "-P", str(Path(__file__).with_name("even.py")), str(folder / "model")]
    done = subprocess.run(
        [*command, str(folder / "files"), *map(str, numbers)], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def uploads(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    own = {"SERVE_APP_HOME": str(folder / "home"), "SERVE_APP_MODELS": upload.MODEL}
    with local_stack(options.port, options.home, **own) as stack:
        return upload.measure(stack, folder / "adapters", options.rank, options.batch, options.rounds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["speed", "even", "upload"], default="speed")
    parser.add_argument("--adapters", type=int, default=1000, help="of --part even")
    parser.add_argument("--clients", type=int, default=48, help="of --part even")
    parser.add_argument("--cache-mb", type=int, default=256, help="of --part even: memory for adapters")
    parser.add_argument("--home", type=Path, help="of --part upload: the server that runs with this state directory")
    parser.add_argument("--port", type=int, default=8127, help="of --part upload: of a server of its own")
    parser.add_argument("--size", default="0.5b", choices=checkpoint.SIZES)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="lora-"))
    sides: list[Side] = []
    if options.part != "speed":
        try:
            told = {"benchmark": f"lora {options.part}"} | {"even": even, "upload": uploads}[options.part](
                options, folder
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(told))
        return 0
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            checkpoint.main([str(folder / "model"), options.size])
        write_adapters(folder / "model", folder / "adapters", options.batch, options.rank)
        told = [str(folder / "model"), str(folder / "adapters"), str(options.rank), str(options.batch)]
        pythons = {"ours": sys.executable} | ({"vllm": options.vllm} if options.vllm else {})
        for name, python in pythons.items():
            sides.append(Side(name, python, told, options.threads))
        found = {
            "benchmark": "lora", "size": options.size, "rank": options.rank, "batch": options.batch,
            "threads": options.threads, "adapter_mb": sides[0].info["adapter_mb"], "report": sides[0].info["report"],
        }  # fmt: skip
        found |= measure(sides, options.batch, options.new, options.rounds, options.prompt)
        found["swapping"] = swapping(sides[0], options.batch, options.new, options.prompt)
    finally:
        for side in sides:
            side.close()
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
    print(f"{options.size}, rank {options.rank}, {options.batch} requests, {found['adapter_mb']} MB an adapter")
    for side, rates in found["tokens_per_s"].items():
        print(f"{side:5} tokens/s: " + "  ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    for what in ("share_of_base", "decode_share_of_base", "ratio_to_vllm"):
        if what in found:
            print(f"{what}: " + "  ".join(f"{name} {share:.3f}" for name, share in found[what].items()))
    print(f"swapping: {found['swapping']}")
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
