import os
from collections.abc import Iterator

import pytest
import torch

from serve_app.kernels.library import build
from serve_app.kernels.library.load import load
from serve_app.kernels.library.native import Library


@pytest.fixture(scope="session")
def library() -> Library:
    """The compiled kernels. Without a compiler their tests skip and say so; with one, a fallback is a
    failure."""
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(f"C++ kernels not tested: {error}")
    if os.environ.get("SERVE_APP_KERNELS") == "torch":
        pytest.skip("C++ kernels not tested: SERVE_APP_KERNELS=torch")
    found, why = load()
    assert found is not None, f"a compiler is there, but the kernels are not used: {why}"
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
