"""The kernels compile for the GPUs they are meant for, on any machine with Triton."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Of these, products take the tensor cores.
TENSOR_CORES = re.compile("attend bf16|experts bf16")
ROOT = Path(__file__).parents[3]
# Bytes of shared memory that a block may have, on the smallest GPU that runs the code (8.6 and 8.9 have less than 8.0).
SHARED_MEMORY = {90: 227 << 10, 80: 99 << 10}


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "count"), [(90, 75), (80, 65)])
def test_every_kernel_compiles_in_every_size(capability: int, count: int, tmp_path: Path) -> None:
    check(count, tmp_path, str(capability))


def test_every_kernel_compiles(tmp_path: Path) -> None:
    check(18, tmp_path, "90", "few")


def check(count: int, tmp_path: Path, *arguments: str) -> None:
    capability = int(arguments[0])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compile_kernels", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == count
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        assert not kernel["spills"], kernel
        # float32 is multiplied exactly, and tensor cores round to fewer bits.
        assert kernel["tensor_cores"] or not TENSOR_CORES.search(kernel["name"]), kernel
