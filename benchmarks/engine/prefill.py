"""Prompts alone, our engine beside llama.cpp at equal bits; reached by ``python -m benchmarks moe --peers llama.cpp``.

Both sides have the same random checkpoint: ours as it is or quantised when it loads, llama.cpp's as a GGUF file in
BF16, Q8_0 or Q4_0. A request is one prompt of distinct token ids and one new token, greedy; sides alternate round by
round and one is stopped while the other runs. In 16 bits the first tokens of both must agree; fewer bits round to other
values on either side, so there only the number of tokens is checked.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.engine.engine import AGREEING, Side, busy_seconds

# Our quantization, and the format of llama.cpp with as many bits.
FORMATS = {"none": "bf16", "int8": "q8_0", "int4": "q4_0"}
LENGTHS = (512, 2048)
CHECKED = 8  # short prompts whose first tokens are compared


def missing(python: str) -> str | None:
    """Why ``python`` can't run llama.cpp, or None."""
    done = subprocess.run([python, "-P", "-c", "import gguf, llama_cpp"], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else None


def compare(folder: Path, files: Path, python: str, lengths: list[int], rounds: int, threads: int) -> dict[str, Any]:
    """Prompt tokens per second of both by bits and length; GGUF files are written into ``files``, and found again."""
    found: dict[str, Any] = {}
    for quantization, kind in FORMATS.items():
        file = files / f"{folder.name}-{kind}.gguf"
        if not file.is_file():
            script = Path(__file__).with_name("gguf_file.py")
            subprocess.run([python, "-P", str(script), str(folder), str(file), kind], check=True)
        sides: list[Side] = []
        try:
            sides.append(Side("ours", sys.executable, folder, threads, quantization, str(max(lengths) + 64)))
            sides.append(Side("llama.cpp", python, file, threads, str(threads), str(max(lengths) + 64)))
            found[quantization] = {"format": kind, **measure(sides, lengths, rounds, compared=quantization == "none")}
        finally:
            for side in sides:
                side.close()
    return found


def measure(sides: list[Any], lengths: list[int], rounds: int, *, compared: bool) -> dict[str, Any]:
    checks, first = Checks(), {}
    for side in sides:
        first[side.name] = [side.run([_prompt(24, row)], [1], f"check/{row}")["tokens"][0] for row in range(CHECKED)]
        checks.equal(f"{side.name}, lengths", [len(answer) for answer in first[side.name]], [1] * CHECKED)
    if compared:
        same = sum(a == b for a, b in zip(*first.values(), strict=True)) / CHECKED
        checks.that("llama.cpp", same >= AGREEING, f"{100 * same:.0f} % of first tokens are ours")
    checks.require()
    result: dict[str, Any] = {}
    for length in lengths:
        rates: dict[str, list[float]] = {side.name: [] for side in sides}
        others: list[float] = []
        for number in range(-1, rounds):  # round -1 warms up
            for side in sides if number % 2 else reversed(sides):
                busy = busy_seconds()
                answer = side.run([_prompt(length, number)], [1], f"{length}/{number}")
                checks.equal(f"{side.name}, {length}, length", len(answer["tokens"][0]), 1)
                if number >= 0:
                    rates[side.name].append(length / answer["seconds"])
                    others.append(max(0.0, (busy_seconds() - busy - answer["cpu_s"]) / answer["wall_s"]))
        checks.require()
        medians = {name: statistics.median(each) for name, each in rates.items()}
        result[f"prompt {length}"] = {
            "tokens_per_s": {name: round(rate, 1) for name, rate in medians.items()},
            "rounds": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
            "ratio": round(medians["ours"] / medians["llama.cpp"], 2),
            "other_cores": round(statistics.median(others), 2),
        }
    return result


def _prompt(length: int, row: int) -> list[int]:
    """Token ids that stay within the smallest vocabulary."""
    return [(7919 * (row + 2) + 13 * column) % 8000 + 10 for column in range(length)]


def report(name: str, found: dict[str, Any]) -> None:
    for quantization, by_length in found.items():
        for length, one in by_length.items():
            if length != "format":
                rates = "  ".join(f"{side} {rate:.0f}" for side, rate in one["tokens_per_s"].items())
                print(f"{name} {length}, {quantization} against {by_length['format']}: {rates} tokens/s = "
                      f"{one['ratio']:.2f}x   (other processes {one['other_cores']:.2f} cores)")  # fmt: skip
