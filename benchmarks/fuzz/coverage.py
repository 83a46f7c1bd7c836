"""The fuzzer led by coverage: inputs that reach new code are kept, changed and tried again (atheris: libFuzzer).

``benchmarks fuzz --coverage`` runs each target in a process of its own, this module, for its share of the time. There
are two kinds of them: those of ``targets.py``, whose inputs hypothesis makes out of the bytes that libFuzzer changes,
and readers of bytes (``raw.py``), which begin with right ones.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RAW = "bytes of "
MISSING = "--coverage needs atheris: `make fuzz`, or `pip install atheris` (Linux; Python 3.11 to 3.13), and try again"
# A target's own imports are not its time; one input that takes longer, or more memory, is a finding.
SLOW_S, MEMORY_MIB, MAX_BYTES = 60, 6144, 1 << 16
_TRIED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_REACHED = re.compile(r"\bcov: (\d+)")


@dataclass(slots=True, frozen=True)
class Tried:
    """``reached``: edges of our code. ``finding``: what was said of it; None: nothing was found."""

    inputs: int
    reached: int
    finding: str | None


def is_there() -> bool:
    return importlib.util.find_spec("atheris") is not None


def names(known: Iterable[str]) -> list[str]:
    from benchmarks.fuzz import raw

    return [*known, *(RAW + name for name in raw.readers())]


def run(name: str, seconds: float, corpus: Path | None, number: int) -> Tried:
    """``corpus``: where what reaches new code is kept, for the next time."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        folder = (Path(scratch) if corpus is None else corpus.resolve()) / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        own = [name, str(max(1, int(seconds))), str(folder), str(number)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.fuzz.coverage", *own], capture_output=True, text=True, errors="replace"
        )
    inputs = [int(found) for found in _TRIED.findall(done.stderr)]
    reached = [int(found) for found in _REACHED.findall(done.stderr)]
    return Tried(sum(inputs), max(reached, default=0), None if done.returncode == 0 else _finding(done.stderr))


def _finding(said: str) -> str:
    """What was raised, or what libFuzzer says of time and memory; then the file with the input."""
    raised = said[said.find("Traceback") :].partition("\n==")[0] if "Traceback" in said else said[-4000:]
    [*_, written] = [line for line in said.splitlines() if "Test unit written to" in line] or [""]
    return f"{written}\n{raised}".strip()


def child(name: str, seconds: str, folder: str, number: str) -> None:
    """Ends this process."""
    import atheris

    with atheris.instrument_imports(include=["serve_app"]):
        from benchmarks.fuzz import raw, targets
    if name.startswith(RAW):
        reader = raw.readers()[name.removeprefix(RAW)]
        for n, data in enumerate(reader.right):
            (Path(folder) / f"right-{n}").write_bytes(data)
        read: Callable[[bytes], Any] = reader.read
    else:
        read = targets.attempts(name, 1, 1).hypothesis.fuzz_one_input

    def attempt(data: bytes) -> None:
        try:
            read(data)
        except Exception as error:
            traceback.print_exception(error)  # with the notes that say what the input was
            raise

    limits = {"max_total_time": seconds, "seed": number, "timeout": SLOW_S, "rss_limit_mb": MEMORY_MIB,
              "max_len": MAX_BYTES, "print_final_stats": 1, "artifact_prefix": f"{folder}/"}  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{option}={value}" for option, value in limits.items()), folder], attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    child(*sys.argv[1:])
