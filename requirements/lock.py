"""Regenerates lock.txt (runtime), s3.txt (what the image adds for files on S3) and dev-lock.txt (only what tests and
lint add to the runtime) with pip-compile, hashes included.

Run by `make lock`. All of them come out of one resolution, so that the development tools never move a runtime
version; the entries are then dealt to the files by what the runtime alone needs.

One lock is for all Pythons and platforms: pip-compile writes the hashes of all files of a version, whoever asks, and
resolves for the Python that runs it. That has to be the oldest, whose newest versions the others can install as well.
``tests/test_locks.py`` checks that nothing is asked for elsewhere alone, and that each has a wheel there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Of those that pyproject.toml names.
OLDEST = (3, 11)
# Nothing about where packages came from may end up in the files: every machine has its own index.
FLAGS = ["--generate-hashes", "--allow-unsafe", "--strip-extras", "--no-header", "--quiet",
         "--annotation-style=line", "--no-emit-index-url", "--no-emit-find-links",
         "--no-emit-trusted-host", "--no-emit-options"]  # fmt: skip
HEADER = "# Made by `make lock` from {sources}; do not edit. For pip install --require-hashes -r {name}\n"


def entries(lock: str) -> dict[str, str]:
    """Lock text -> {normalised package name: its lines (pin, hashes, why)}."""
    found: dict[str, str] = {}
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", lock):
        if match := re.match(r"([A-Za-z0-9._-]+)==", block):
            lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
            text = "\n".join(lines).replace(f"-r {HERE}/", "-r ")  # no path of this machine
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = text + "\n"
    return found


def compile_lock(sources: list[Path], *extra: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        command = [
            sys.executable,
            "-m",
            "piptools",
            "compile",
            *FLAGS,
            *extra,
            "-o",
            str(out),
            *map(str, sources),
        ]
        subprocess.run(command, check=True)
        return entries(out.read_text())


def write(name: str, sources: str, chosen: dict[str, str]) -> None:
    body = "".join(chosen[key] for key in sorted(chosen))
    (HERE / name).write_text(HEADER.format(sources=sources, name=name) + body)
    print(f"{name}: {len(chosen)} packages")


def main() -> None:
    """Ends with SystemExit, before anything is resolved, on another Python than the oldest."""
    if sys.version_info[:2] != OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SystemExit(
            f"locks are made on Python {oldest}, the oldest that is supported: newer ones resolve to versions that it "
            f"cannot install. Run: make clean && PYTHON=python{oldest} make lock"
        )
    everything = compile_lock([HERE / "runtime.in", HERE / "dev.in"])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("\n".join(block.split(" ", 1)[0] for block in everything.values()))
        pins.flush()
        needed = compile_lock([HERE / "runtime.in"], "--constraint", pins.name)
        with_s3 = compile_lock([HERE / "runtime.in", HERE / "s3.in"], "--constraint", pins.name)
    write("lock.txt", "runtime.in", {key: everything[key] for key in needed})
    write("s3.txt", "s3.in", {key: everything[key] for key in with_s3 if key not in needed})
    write("dev-lock.txt", "dev.in", {key: text for key, text in everything.items() if key not in needed})


if __name__ == "__main__":
    main()
