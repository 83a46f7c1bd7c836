"""Adapters of a form that has been read before are packed straight from their file, with the same result."""

from __future__ import annotations

import pytest
import torch

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import read_adapter
from serve_app.kernels.linear.panels import panel_library
from serve_app.models import adapters
from tests.adapters.made import config, weights
from tests.worker.test_packed_files import LINEARS, bank_of

pytestmark = pytest.mark.skipif(panel_library() is None, reason="needs a compiler and AVX512_BF16")
SHAPES = {f"{i}.{j}": (n, one.columns) for i, one in enumerate(LINEARS) for j, n in enumerate(one.widths)}


def file(seed: int, rank: int = 4, dtype: torch.dtype = torch.bfloat16) -> bytes:
    return weights(SHAPES, rank, dtype=dtype, seed=seed)


def same(found, wanted) -> bool:
    packed, other = found.packed, wanted.packed
    return bool((packed.records == other.records).all() and (packed.memory.bytes == other.memory.bytes).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [3, 16, 20])
def test_the_next_of_a_form_is_read_as_if_it_were_the_first(rank, dtype, monkeypatch):
    bank, told, read = bank_of(), config(r=rank), []
    monkeypatch.setattr(adapters, "read_adapter", lambda *of: read.append(of) or read_adapter(*of))
    for seed in (1, 2, 3):
        data = file(seed, rank, dtype)
        assert same(bank.read(told, data), bank_of().prepare(read_adapter(told, data)))
    # Numbers in float16 are turned into others first, which nobody does straight from the file.
    assert len(read) == (3 if dtype is torch.float16 else 1)


def test_another_configuration_is_another_form():
    bank, data = bank_of(), file(1)
    once, twice = (bank.read(config(r=4, lora_alpha=alpha), data).packed.memory.bytes for alpha in (8, 16))
    assert not (once == twice).all()
    with pytest.raises(AdapterRefused, match="rank 8"):
        bank.read(config(r=8), data)
    assert same(bank.read(config(r=4), data), bank_of().read(config(r=4), data))


def test_what_is_wrong_with_the_next_one_is_named():
    bank, data = bank_of(), file(1)
    bank.read(config(), data)
    with pytest.raises(AdapterRefused, match=r"2\.0\.lora_B\.weight has numbers that are not finite"):
        bank.read(config(), data[:-2] + b"\x80\x7f")
    for damaged in (data[:-2], data + b"\0\0", b""):
        with pytest.raises(AdapterRefused, match="upload the whole file"):
            bank.read(config(), damaged)
    assert same(bank.read(config(), file(2)), bank_of().read(config(), file(2)))


def test_a_bounded_number_of_forms_is_known(monkeypatch):
    monkeypatch.setattr(adapters, "FORMS", 2)
    bank, data = bank_of(), file(1)
    for alpha in (1, 2, 3, 1):
        found = bank.read(config(lora_alpha=alpha), data)
        assert same(found, bank_of().read(config(lora_alpha=alpha), data))
    assert len(bank._recipes._recipes) == 2
