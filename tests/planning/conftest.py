"""What tests of plans share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several
    yield
    torch.set_num_threads(before)
