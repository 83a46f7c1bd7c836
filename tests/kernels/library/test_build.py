"""Building, caching and doing without the compiler, each in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.kernels.library import build

ROOT = Path(__file__).parents[3]
REPORT = "from serve_app.kernels.library.load import load; found, why = load(); print('cpp' if found else 'torch', why)"


def start(home: Path, code: str = REPORT, **env: str) -> subprocess.Popen[str]:
    full = {**os.environ, "SERVE_APP_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    full.pop("SERVE_APP_KERNELS", None) if "SERVE_APP_KERNELS" not in env else None
    return subprocess.Popen(
        [sys.executable, "-c", code], env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def compiler_or_skip() -> str:
    try:
        return build.find_compiler()
    except build.BuildError as error:
        pytest.skip(f"C++ build not tested: {error}")


def test_two_processes_build_once(tmp_path: Path) -> None:
    """With a source that compiles at once; every other test runs on the real ones, built in the same way."""
    compiler_or_skip()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "a.cpp").write_text("int x;")
    code = f"""
from pathlib import Path
from serve_app.kernels.library import build
build.SOURCES = Path({str(tmp_path / "cpu")!r})
print(build.build())
"""
    runs = [start(tmp_path, code) for _ in range(2)]
    outputs = [run.communicate(timeout=240) for run in runs]
    (directory,) = (tmp_path / "kernels").iterdir()
    assert [out.strip() for out, _ in outputs] == [str(directory / build.LIBRARY)] * 2, outputs
    assert sum(err.count("compiling CPU kernels") for _, err in outputs) == 1
    assert sorted(p.name for p in directory.iterdir()) == [build.LIBRARY, "lock"]


@pytest.mark.slow
def test_no_compiler_falls_back_and_says_so(tmp_path: Path) -> None:
    out, err = start(tmp_path, PATH="", CXX="").communicate(timeout=120)
    assert out.startswith("torch no C++ compiler on PATH")
    assert [line for line in err.splitlines() if "kernels unavailable" in line], err


@pytest.mark.slow
def test_a_failing_compiler_falls_back(tmp_path: Path) -> None:
    fake = tmp_path / "broken-c++"
    fake.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    out, err = start(tmp_path / "home", CXX=str(fake)).communicate(timeout=120)
    assert out.startswith("torch ") and "no such thing" in out
    assert "kernels unavailable" in err


@pytest.mark.slow
def test_a_wrong_library_fails_its_self_test(tmp_path: Path) -> None:
    """A kernel that computes something else must never be used: here one that divides by one weight too
    many."""
    compiler_or_skip()
    code = f"""
import shutil
from pathlib import Path
from serve_app.kernels.library import build
sources = Path({str(tmp_path)!r}) / "cpu"
shutil.copytree(build.SOURCES, sources)
text = (sources / "paged_attention.h").read_text()
assert "total > 0 ? 1.f / total" in text
text = text.replace("total > 0 ? 1.f / total", "total > 0 ? 1.f / (total + 1)")
(sources / "paged_attention.h").write_text(text)
build.SOURCES = sources
{REPORT}
"""
    out, err = start(tmp_path / "home", code).communicate(timeout=240)
    assert out.startswith("torch self-test: paged attention"), (out, err)
    assert "kernels unavailable" in err


@pytest.mark.slow
def test_an_unwritable_cache_falls_back(tmp_path: Path) -> None:
    compiler_or_skip()
    (tmp_path / "file").write_text("")
    out, _ = start(tmp_path / "file").communicate(timeout=120)
    assert out.startswith("torch cannot write") and "SERVE_APP_HOME" in out


def test_key_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_or_skip()
    before = build.cache_key(compiler)
    (tmp_path / "a.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.cache_key(compiler) != before
