"""Compiles the C++ kernels at first use and keeps the result, keyed by everything that could change it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "cpu"
LIBRARY = "kernels.so"
COMPILERS = ("g++", "clang++", "c++")

# No -ffast-math: masked scores are -inf and must stay exact. Without errno and traps exp/sqrt still
# vectorise.
_COMMON = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-w")
# What `SERVE_APP_KERNELS=asan` adds: a process then needs the compiler's libasan.so in LD_PRELOAD (`make test-asan`).
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address")
# Tried in turn: a compiler without OpenMP (or without -march=native) still gives a correct, slower library.
_VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())


class BuildError(RuntimeError):
    """No usable compiler, or the compiler refused; the text names the reason and the remedy."""


def cache_root() -> Path:
    """``$SERVE_APP_HOME/kernels``, by default ``~/.serve_app/kernels``."""
    return Path(os.environ.get("SERVE_APP_HOME") or Path.home() / ".serve_app") / "kernels"


def find_compiler() -> str:
    """Absolute path of ``$CXX`` or of the first C++ compiler on PATH. Raises :class:`BuildError`."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler on PATH (install g++ or set CXX)")


def flags() -> tuple[str, ...]:
    """What every variant is compiled with."""
    return _COMMON + (_SANITIZED if os.environ.get("SERVE_APP_KERNELS") == "asan" else ())


def cpu_identity() -> str:
    """Architecture plus instruction set flags: a library built with -march=native runs only where these
    agree."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def cache_key(compiler: str) -> str:
    """32 hex digits over sources, flags, compiler (path, size, time) and CPU. Reads files only, starts no
    process."""
    stat = os.stat(os.path.realpath(compiler))
    parts = [repr((flags(), _VARIANTS, compiler, stat.st_size, stat.st_mtime_ns)), cpu_identity()]
    parts += [f"{p.name}\0{p.read_text()}" for p in sorted(SOURCES.iterdir()) if p.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def build(*, timeout: float = 600.0) -> Path:
    """Path of the compiled library, building it if this machine has none yet.

    Safe between processes: a file lock lets one compile while the others wait for its result, and the library
    appears by an atomic rename. ``timeout`` (seconds) bounds the compilation of one
    source. Raises :class:`BuildError`.
    """
    compiler = find_compiler()
    directory = cache_root() / cache_key(compiler)
    library = directory / LIBRARY
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also when this process dies
            if not library.exists():
                _compile(compiler, library, timeout)
    except OSError as error:
        raise BuildError(f"cannot write {directory}: {error} (set SERVE_APP_HOME to a writable directory)") from error
    return library


def _compile(compiler: str, library: Path, timeout: float) -> None:
    started, said = time.monotonic(), ""
    print("serve-app: compiling CPU kernels (once per machine) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent) as folder:
        for variant in _VARIANTS:
            command = [compiler, *flags(), *variant]
            try:
                failed = _objects(command, Path(folder), timeout) or _run(
                    [*command, *map(str, sorted(Path(folder).glob("*.o"))), "-o", f"{folder}/{LIBRARY}"], timeout
                )
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{compiler} took longer than {timeout:.0f} s") from error
            if not failed:
                os.replace(f"{folder}/{LIBRARY}", library)
                took = time.monotonic() - started
                print(f"serve-app: CPU kernels ready in {took:.1f} s", file=sys.stderr, flush=True)
                return
            said = said or next((line for line in failed.splitlines() if "error" in line), failed[:200])
    raise BuildError(f"{compiler} failed: {said}")


def _objects(command: list[str], folder: Path, timeout: float) -> str:
    """Compiles each source on a core of its own; what the compiler said of the first that it refused, or nothing."""
    # The largest takes longest, so it begins first.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()) as cores:
        runs = [
            cores.submit(_run, [*command, "-c", str(one), "-o", str(folder / f"{one.stem}.o")], timeout)
            for one in sources
        ]
        return next(filter(None, (run.result() for run in runs)), "")


def _run(command: list[str], timeout: float) -> str:
    """What a compiler that fails says, and nothing of one that does not. Raises :class:`subprocess.TimeoutExpired`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return "" if done.returncode == 0 else done.stderr or f"status {done.returncode}"
