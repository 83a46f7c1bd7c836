"""The kernels compiled with AddressSanitizer, over every shape and every hostile configuration that tests have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.kernels.library import build

ROOT = Path(__file__).parents[3]
# By subject, so that one can be run alone.
TESTS = {
    "kernels": (
        "tests/kernels/test_attention.py", "tests/kernels/test_masking.py", "tests/kernels/test_norm.py",
        "tests/kernels/test_shapes.py", "tests/kernels/linear",
    ),
    "folders": (
        "tests/models/test_odd_shapes.py", "tests/models/loading/test_folder.py", "tests/models/test_load.py",
        "tests/models/loading/test_check.py", "tests/models/test_chunked.py",
    ),
    "decoder": (
        "tests/models/decoders/test_fused_decoder.py", "tests/models/decoders/test_capture.py",
        "tests/models/test_quantization.py", "tests/models/test_input_embeddings.py",
    ),
    "mixtures": ("tests/models/mixtures", "tests/models/test_latent.py"),
    "adapters": (
        "tests/models/test_adapters.py", "tests/models/test_linears.py", "tests/parity/test_adapters.py",
        "tests/worker/test_packed_files.py",
    ),
}  # fmt: skip


def runtime() -> str:
    """The compiler's AddressSanitizer for LD_PRELOAD and the C++ runtime, whose exceptions it wraps; or a skip."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(f"no sanitised kernels: {error}")

    def library(name: str) -> str:
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        return os.path.realpath(found) if os.path.isabs(found) and os.path.exists(found) else ""

    sanitizer = library("libasan.so") or library("libclang_rt.asan-x86_64.so")
    if not sanitizer:
        pytest.skip(f"{compiler} has no AddressSanitizer")
    return f"{sanitizer} {library('libstdc++.so.6')}".strip()


def run(arguments: list[str], folder: Path, timeout: float) -> tuple[int, str]:
    """Status and what was said: by AddressSanitizer, where it ended the process, else by the process."""
    env = {
        **os.environ,
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode=99:log_path={folder / 'asan'}",
        "SERVE_APP_KERNELS": "asan",
        "PYTHONPATH": str(ROOT),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    reports = "".join(file.read_text()[:3000] for file in folder.glob("asan.*"))
    return done.returncode, reports or done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_wrong_access_is_found(tmp_path: Path) -> None:
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
    status, said = run(["-c", code], tmp_path, 600)
    assert status == 99 and "heap-buffer-overflow" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("subject", TESTS)
def test_no_access_outside_of_tensors(subject: str, tmp_path: Path) -> None:
    status, said = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS[subject]], tmp_path, 3000)
    assert status == 0, said
