"""What workers do to their process must not outlast a test that loads one in its own."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def gradients_as_before():
    before = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(before)
