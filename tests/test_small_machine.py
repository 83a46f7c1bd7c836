"""What is said at the start of a machine with little: read from files as kernels write them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import memory, small_machine
from serve_app.catalog.load import load_catalog
from serve_app.config import Settings, load_settings
from serve_app.small_machine import ModelNeed, fitting, little_memory, one_core, usable_cores, warnings, workers_room

MIB, GIB = 1 << 20, 1 << 30
INSTRUCT = "@cf/pico/pico-instruct"
MEMINFO = "MemTotal:       {} kB\nMemFree:         1000000 kB\nMemAvailable:   2000000 kB\nHugePages_Total:       0\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of 24 GiB without containers, whose files a test may write."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    (tmp_path / "meminfo").write_text(MEMINFO.format(24 << 20))
    for folder in ("memory", "cpu"):
        (tmp_path / "cgroup" / folder).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def settings(machine: Path) -> Settings:
    return load_settings({}, home=machine / "home")


def said(settings: Settings) -> list[str]:
    return warnings(settings, load_catalog(settings.home))


def test_a_machine_with_enough_hears_nothing(settings, monkeypatch) -> None:
    monkeypatch.setattr(small_machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(small_machine, "find_compiler", lambda: "/usr/bin/g++")
    assert said(settings) == []


def test_without_a_compiler_on_path(settings, machine, monkeypatch) -> None:
    monkeypatch.setattr(small_machine, "usable_cores", lambda: 2)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("SERVE_APP_KERNELS", raising=False)
    monkeypatch.setenv("PATH", str(machine))
    [line] = said(settings)
    assert "no C++ compiler" in line and "slower" in line and "apt install g++" in line and "\n" not in line
    # Nothing is compiled for GPUs here, and who wants torch knows it.
    assert said(settings.model_copy(update={"profile": "gpu", "models": ("@cf/qwen/qwen3-0.6b",)})) == []
    monkeypatch.setenv("SERVE_APP_KERNELS", "torch")
    assert said(settings) == []
    monkeypatch.delenv("SERVE_APP_KERNELS")
    (machine / "clang++").write_text("#!/bin/sh\n")
    (machine / "clang++").chmod(0o755)
    assert said(settings) == []


@pytest.mark.skipif(shutil.which("taskset") is None or sys.platform != "linux", reason="needs taskset")
def test_a_process_that_is_bound_to_one_core() -> None:
    code = "from serve_app.small_machine import one_core, usable_cores; print(one_core(usable_cores()))"
    core = str(min(os.sched_getaffinity(0)))
    bound = ["taskset", "-c", core, sys.executable, "-c", code]
    ran = subprocess.run(bound, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("there is one processor core") and "SERVE_APP_MODELS" in ran.stdout


def test_a_container_gets_part_of_the_processors(machine, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    cgroup = machine / "cgroup"
    assert usable_cores(cgroup) == 8
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert usable_cores(cgroup) == 8
    (cgroup / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(cgroup) == 2
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(cgroup) == 1 and one_core(1) and one_core(2) is None
    (cgroup / "cpu.max").unlink()
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(cgroup) == 8
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert usable_cores(cgroup) == 3


def test_memory_is_the_machine_s_or_the_container_s(machine) -> None:
    cgroup = machine / "cgroup"
    assert memory.total_bytes() == 24 * GIB
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert memory.total_bytes() == 24 * GIB
    (cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{6 * GIB}\n")
    assert memory.total_bytes() == 6 * GIB
    (cgroup / "memory.max").write_text("max\n")
    assert memory.total_bytes() == 6 * GIB
    (cgroup / "memory.max").write_text(f"{4 * GIB}\n")
    assert memory.total_bytes() == 4 * GIB
    shutil.rmtree(cgroup)
    (machine / "meminfo").unlink()  # not Linux
    assert memory.total_bytes() is None


def test_a_machine_of_4_gb(settings, machine, monkeypatch) -> None:
    """What is said of it, and that a start as it is told hears nothing more."""
    monkeypatch.setattr(small_machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(small_machine, "find_compiler", lambda: "/usr/bin/g++")
    (machine / "meminfo").write_text(MEMINFO.format(3_900_000))
    [line] = said(settings)
    assert line.startswith("there are 3.72 GiB of memory") and "\n" not in line
    told = dict(word.rstrip(",").split("=", 1) for word in line.split() if word.startswith("SERVE_APP_"))
    assert set(told) == {"SERVE_APP_OBJECT_STORE_BYTES", "SERVE_APP_MODELS", "SERVE_APP_MEMORY_BUDGET"}
    kept = told["SERVE_APP_MODELS"].split(",")
    left = line.partition("which leaves out ")[2].split(", ")
    assert INSTRUCT in kept and left and not set(left) & set(kept)
    every = {record.id for record, _ in load_catalog(settings.home).started("local", ())}
    assert {*left, *kept} == every
    assert said(load_settings(told, home=settings.home)) == []


NEEDS = [
    ModelNeed("large", kept=800 * MIB, least=0, all=800 * MIB),
    ModelNeed("small", kept=200 * MIB, least=0, all=200 * MIB),
    ModelNeed("asleep", kept=0, least=150 * MIB, all=400 * MIB),
    ModelNeed("heavy", kept=0, least=300 * MIB, all=500 * MIB),
]


@pytest.mark.parametrize(
    ("room", "fit"),
    [
        (1300, ["large", "small", "asleep", "heavy"]),
        (1160, ["large", "small", "asleep"]),
        (960, ["large", "asleep"]),
        (700, ["small", "asleep", "heavy"]),
        (160, ["asleep"]),
        (100, []),
    ],
)
def test_those_that_never_sleep_come_first(room: int, fit: list[str]) -> None:
    assert fitting(NEEDS, room * MIB) == fit


def total_for(room: int, store: int) -> int:
    """The least memory that leaves so much to workers."""
    return next(total for total in range(0, 64 * GIB, 16 * MIB) if workers_room(total, store) >= room)


def test_what_is_said_of_memory() -> None:
    wanted = sum(need.all for need in NEEDS)
    assert little_memory(total_for(wanted, GIB), GIB, 0, NEEDS) is None
    # By turns all have room.
    line = little_memory(total_for(1408 * MIB, GIB), GIB, 0, NEEDS) or ""
    assert line.endswith("They take turns after a start with SERVE_APP_MEMORY_BUDGET=1408MiB")
    # A smaller object store is enough.
    line = little_memory(total_for(900 * MIB, GIB), GIB, 0, NEEDS) or ""
    assert "SERVE_APP_OBJECT_STORE_BYTES=256MiB" in line and "SERVE_APP_MODELS" not in line
    # It is small already.
    line = little_memory(total_for(960 * MIB, 256 * MIB), 256 * MIB, 0, NEEDS) or ""
    assert "SERVE_APP_OBJECT_STORE" not in line and "MODELS=large,asleep " in line and "leaves out small, heavy" in line
    assert "No model fits" in (little_memory(GIB, GIB, 0, NEEDS) or "")
    # The operator has chosen a budget.
    assert little_memory(total_for(700 * MIB, GIB), GIB, 600 * MIB, NEEDS) is None
    line = little_memory(total_for(700 * MIB, GIB), GIB, 900 * MIB, NEEDS) or ""
    assert "SERVE_APP_MEMORY_BUDGET is 900 MiB" in line and "SERVE_APP_OBJECT_STORE_BYTES" in line
