"""The kernels compile for the GPUs they are meant for, on any machine with Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHARED_MEMORY = 227 << 10  # bytes that a block may have on compute capability 9.0


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_kernels"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 15
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert not kernel["spills"], kernel
        assert kernel["tensor_cores"] or "attend" not in kernel["name"], kernel
