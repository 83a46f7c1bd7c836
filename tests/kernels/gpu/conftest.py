"""The Triton kernels, on a GPU where there is one and in Triton's interpreter elsewhere."""

import os

import pytest
import torch

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)
else:
    # Read when a kernel is decorated, so before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="the kernels are not tested without triton (requirements/triton.txt)")


if not torch.cuda.is_available():
    from tests.kernels.gpu.interpreting import let_loop_bounds_be_arrays

    let_loop_bounds_be_arrays()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels as a GPU has them, wherever tensors lie."""
    from serve_app.kernels.gpu.backend import _checked

    monkeypatch.setenv("SERVE_APP_KERNELS", "triton")
    _checked.cache_clear()
    yield
    monkeypatch.undo()
    _checked.cache_clear()
