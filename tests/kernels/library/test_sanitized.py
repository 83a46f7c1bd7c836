"""The kernels compiled with AddressSanitizer, over every shape and every hostile configuration that tests have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.kernels.library import build

ROOT = Path(__file__).parents[3]
TESTS = (
    "tests/kernels/test_attention.py", "tests/kernels/test_norm.py", "tests/kernels/test_shapes.py",
    "tests/kernels/linear", "tests/models/test_odd_shapes.py", "tests/models/test_folder.py",
    "tests/models/test_load.py", "tests/models/test_fused_decoder.py", "tests/models/test_experts.py",
    "tests/models/test_check.py", "tests/models/test_chunked.py",
)  # fmt: skip


def runtime() -> str:
    """Path of the compiler's AddressSanitizer, or a skip."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(f"no sanitised kernels: {error}")
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if os.path.isabs(found) and os.path.exists(found):
            return os.path.realpath(found)
    pytest.skip(f"{compiler} has no AddressSanitizer")


def run(arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "SERVE_APP_KERNELS": "asan",
        "PYTHONPATH": str(ROOT),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_a_wrong_access_is_found() -> None:
    """What the next test would see: a call whose lengths lie, past every check."""
    code = """
import torch
from serve_app.kernels.library import native
from serve_app.kernels.library.load import cpu_library
x, weight = torch.ones(4, 64), torch.ones(64)
library = cpu_library()
assert library is not None
library.norm(native._NORM.pack(x.data_ptr(), weight.data_ptr(), x.data_ptr(), 5, 64, 64, 1, 0, 1, 1e-6))
"""
    done = run(["-c", code], 600)
    assert done.returncode == 99 and "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
def test_no_access_outside_of_tensors() -> None:
    done = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS], 3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
