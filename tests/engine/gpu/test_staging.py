"""Packing arrays for one transfer."""

import numpy as np
import pytest
import torch

from serve_app.engine.gpu.staging import ALIGNMENT, pack, to_device, unpack


@pytest.mark.parametrize("way", ["packed", "shared"])
def test_arrays_come_back(way):
    arrays = [
        np.arange(7), np.zeros(0, np.int64), np.arange(6, dtype=np.int32).reshape(2, 3), np.array([0.25]),
        np.array([1.5, 2], np.float32), np.zeros((0, 4), np.int32),
    ]  # fmt: skip
    found = unpack(pack(arrays, pinned=False), arrays) if way == "packed" else to_device(arrays, torch.device("cpu"))
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.shape == array.shape and tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
    if way == "packed":
        assert all(t.data_ptr() % ALIGNMENT == found[0].data_ptr() % ALIGNMENT for t in found)
