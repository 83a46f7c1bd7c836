"""The engine offline against its peers, alternating round by round.

    python -m benchmarks engine MODEL_DIR [--vllm PEER_PYTHON] [--batch 1,8,32] [--rounds 3] [--profile] [--json]

Each side runs in its own process with the same prompts (128 distinct token ids each) and 64 new tokens, greedy, no
prefix shared; prompts' prefill counts, as in vLLM's own offline measure. ``transformers`` is ``generate`` with its
defaults, run in the first round only (it is slow). A side is stopped while another runs. Start-up is from starting the
process to the first token. The roofline is this machine's read bandwidth, taken before and after every run: a decode
step must read all weights (of experts the chosen ones) and the keys and values of its requests; bfloat16 weights that
are read in 12 bits have a second one, of what they would be unpacked. Figures count only where other processes were
quiet.

Every answer of every side has as many tokens as were asked for. Ours are the same in every round, and begin as every
peer's do: of all first tokens, ``AGREEING`` must be equal (not all, since rounding in bfloat16 may decide between two).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.checks import Checks
from benchmarks.engine.profile import profile
from benchmarks.engine.workloads import NEW, prompts, workloads

AGREEING = 0.75


class Side:
    """One engine's process. It sleeps (SIGSTOP) except while it is asked something."""

    def __init__(self, name: str, python: str, model_dir: Path, threads: int, *options: str) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(ROOT) if name == "ours" else "", "OMP_NUM_THREADS": str(threads)}
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).with_name("sides.py")), name, str(model_dir), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT if name == "ours" else "/",
            start_new_session=True,
        )
        with contextlib.suppress(RuntimeError):
            os.set_blocking(self._process.stderr.fileno(), False)  # type: ignore[union-attr]
        self.info = self._answer()
        self.startup_s = time.perf_counter() - started
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], new: list[int], salt: str) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        started, before = time.perf_counter(), self._cpu_seconds()
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new, "salt": salt}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        answer |= {"wall_s": time.perf_counter() - started, "cpu_s": self._cpu_seconds() - before}
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Ends the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # vLLM's workers outlive their parent
            self._signal(signal.SIGKILL)

    def _cpu_seconds(self) -> float:
        """Processor time of the side's processes so far (they share a session; 0 where /proc is missing)."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._process.pid:
                    total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = (self._process.stderr.read() or "") if self._process.stderr else ""
            raise SystemExit(f"{self.name} ended: {said[-2000:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def busy_seconds() -> float:
    """Processor time of everything on this machine since it started (0 where /proc is missing)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(f) for i, f in enumerate(fields[:8]) if i not in (3, 4)) / os.sysconf("SC_CLK_TCK")


def measure(
    sides: list[Side], rounds: int, loads: dict[str, tuple[list[int], list[int]]], bandwidth: Callable[[], float]
) -> dict[str, Any]:
    taken: dict[str, dict[str, list[dict[str, Any]]]] = {n: {s.name: [] for s in sides} for n in loads}
    read: list[float] = []
    known: dict[str, dict[str, list[list[int]]]] = {}
    checks = Checks()
    for number in range(-1, rounds):  # round -1 warms up
        for name, (lengths, new) in loads.items():
            for side in sides if number % 2 else reversed(sides):
                if side.name == "transformers" and (number > 0 or name == "mixed"):
                    continue
                if side.name == "transformers" and number < 0:
                    side.run(prompts(lengths[:1]), [2], "")
                    continue
                before, busy = bandwidth(), busy_seconds()
                answer = side.run(prompts(lengths), new if number >= 0 else [4] * len(new), f"{name}/{number}")
                wanted = new if number >= 0 else [4] * len(new)
                checks.equal(f"{side.name}, {name}, lengths", [len(a) for a in answer["tokens"]], wanted)
                if number >= 0:
                    compare_tokens(checks, f"{side.name}, {name}", answer["tokens"], known.setdefault(name, {}))
                checks.require()
                answer["others"] = max(0.0, (busy_seconds() - busy - answer["cpu_s"]) / answer["wall_s"])
                answer["read_gbps"] = (before + bandwidth()) / 2
                if number >= 0:
                    taken[name][side.name].append(answer)
                    read.append(answer["read_gbps"])
                    print(f"  round {number} {name:9} {side.name:13} {sum(new) / answer['seconds']:9.1f} tokens/s"
                          f"   (read bandwidth {answer['read_gbps']:.1f} GB/s, "
                          f"other processes {answer['others']:.2f} cores)", file=sys.stderr, flush=True)  # fmt: skip
    ours = next(s for s in sides if s.name == "ours")
    results = {name: _summary(by_side, sum(loads[name][1]), ours.info) for name, by_side in taken.items()}
    return {"read_gbps": statistics.median(read), "workloads": results}


def compare_tokens(checks: Checks, where: str, tokens: list[list[int]], known: dict[str, list[list[int]]]) -> None:
    """``known``: what each side answered to the same prompts in its first round; a new side is put there."""
    side = where.partition(",")[0]
    if side in known:
        if side == "ours":
            checks.equal(f"{where}, another round", tokens, known[side])
        return
    known[side] = tokens
    for peer, theirs in known.items():
        same = sum(a[0] == b[0] for a, b in zip(tokens, theirs, strict=True)) / len(tokens)
        checks.that(where, same >= AGREEING, f"{100 * same:.0f} % of first tokens are those of {peer}")


def _summary(by_side: dict[str, list[dict[str, Any]]], tokens: int, info: dict[str, Any]) -> dict[str, Any]:
    rates = {name: [tokens / r["seconds"] for r in runs] for name, runs in by_side.items() if runs}
    result: dict[str, Any] = {"tokens_per_s": {n: round(statistics.median(v), 1) for n, v in rates.items()}}
    result["other_cores"] = {n: [round(r["others"], 2) for r in v] for n, v in by_side.items() if v}
    result["rounds"] = {n: [round(x, 1) for x in v] for n, v in rates.items()}
    result["ratio"] = {
        n: round(statistics.median(rates["ours"]) / statistics.median(v), 2) for n, v in rates.items() if n != "ours"
    }
    runs = by_side["ours"]
    result["prefill_tokens_per_s"] = round(statistics.median(r["prefill_tokens"] / r["prefill_s"] for r in runs), 1)
    result["decode_tokens_per_s"] = round(statistics.median(r["decode_tokens"] / r["decode_s"] for r in runs), 1)
    result["decode_step_ms"] = round(statistics.median(1e3 * r["decode_s"] / r["decode_steps"] for r in runs), 3)
    for name, weights in (("roofline_share", "weight_bytes"), ("plain_roofline_share", "plain_bytes")):
        moved = [bytes_needed(r, info, info[weights]) / r["decode_s"] / 1e9 for r in runs]
        result[name] = round(statistics.median(m / r["read_gbps"] for m, r in zip(moved, runs, strict=True)), 3)
    if info["expert_bytes"]:
        per_step = statistics.median(bytes_needed(r, info, info["weight_bytes"]) / r["decode_steps"] for r in runs)
        result["step_mb"] = round(per_step / 1e6, 1)
        chosen = statistics.median(r["expert_bytes_read"] / r["decode_steps"] for r in runs)
        result["experts_share"] = round(chosen / info["expert_bytes"], 3)
    return result


def bytes_needed(run: dict[str, Any], info: dict[str, Any], weights: int) -> float:
    """What the decode steps of ``run`` must read where all weights take ``weights`` bytes: those that are no experts',
    the experts that rows have chosen, and keys and values."""
    packed, of_experts = info["weight_bytes"], info["expert_bytes"]
    read = run["decode_steps"] * (packed - of_experts) + run["expert_bytes_read"]
    return read * (weights / packed if packed else 1.0) + run["kv_tokens_read"] * info["kv_token_bytes"]


def report(found: dict[str, Any]) -> None:
    print(f"{found['model']}: read bandwidth {found['read_gbps']:.1f} GB/s, {found['threads']} threads")
    print(f"optimisations: {found['report']}")
    for name, seconds in found["startup_s"].items():
        peak = f"   peak memory {found['peak_mb'][name]} MB" if name in found["peak_mb"] else ""
        print(f"start-up to first token  {name:13} {seconds:7.1f} s{peak}")
    for name, w in found["workloads"].items():
        rates = "  ".join(f"{n} {v:.1f}" for n, v in w["tokens_per_s"].items())
        ratios = "  ".join(f"{v:.2f}x {n}" for n, v in w["ratio"].items())
        print(f"{name:9} tokens/s: {rates}   = {ratios or '-'}")
        print(f"          prefill {w['prefill_tokens_per_s']:.0f}/s, decode {w['decode_tokens_per_s']:.1f}/s, "
              f"step {w['decode_step_ms']:.2f} ms, {100 * w['roofline_share']:.0f} % of the roofline, "
              f"{100 * w['plain_roofline_share']:.0f} % of that of unpacked weights")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-mixed", action="store_true", help="leave the mixed-length trace out")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"], help="of our weights")
    parser.add_argument("--new", type=int, default=NEW, help="tokens of each answer")
    parser.add_argument("--profile", action="store_true", help="print where our step's time goes, without peers")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    batches = [int(b) for b in options.batch.split(",")]
    model_dir = options.model_dir.resolve()
    profiled = options.profile
    found = profile(model_dir, batches, options.threads) if profiled else compare(model_dir, batches, options)
    if options.json:
        print(json.dumps(found))
    return 0


def compare(model_dir: Path, batches: list[int], options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.engine.kernels import read_bandwidth

    pythons = {"ours": sys.executable}
    if not options.no_transformers:
        pythons["transformers"] = sys.executable
    if options.vllm:
        pythons["vllm"] = options.vllm
    sides: list[Side] = []
    # Ending the benchmark must end its sides, which may be stopped.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name, python in pythons.items():
            print(f"  starting {name} ...", file=sys.stderr, flush=True)
            told = [options.quantization] if name == "ours" else []
            sides.append(Side(name, python, model_dir, options.threads, *told))
        found = measure(
            sides, options.rounds, workloads(batches, not options.no_mixed, options.new), lambda: read_bandwidth(5)
        )
        found |= {
            "model": model_dir.name,
            "threads": options.threads,
            "report": sides[0].info["report"],
            "startup_s": {s.name: round(s.startup_s, 1) for s in sides},
            "peak_mb": {s.name: round(s.run(prompts([4]), [2], "end")["peak_mb"]) for s in sides if s.name != "vllm"},
        }
    finally:
        for side in sides:
            side.close()
        signal.signal(signal.SIGTERM, before)
    report(found)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
