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


def _let_loop_bounds_be_arrays() -> None:
    """Triton before 3.8 converts loop bounds, arrays of one element, in a way that numpy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch


if not torch.cuda.is_available():
    _let_loop_bounds_be_arrays()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
