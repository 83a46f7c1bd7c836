"""Packed adapters on the disk: the same as those that are packed again, bounded, and never believed when damaged."""

from __future__ import annotations

import os
import time
import zlib

import pytest
import torch

from serve_app.adapters.weights import AdapterWeights, Delta
from serve_app.kernels.linear.packing import LinearLayout
from serve_app.kernels.linear.panels import plain_order
from serve_app.kernels.linear.places import Places
from serve_app.models.adapters import AdapterBank
from serve_app.models.linears import Place
from serve_app.worker.packed_files import KEPT_S, PackedFiles


def paired(inner: int):
    return plain_order(2 * inner).reshape(2, inner // 32, 32).transpose(1, 0, 2).reshape(-1).copy()


HEAD = 48  # bytes before what is summed up
LINEARS = [
    LinearLayout((96, 32, 32), 48, plain_order(160)),
    LinearLayout((64, 64), 48, paired(64)),
    LinearLayout((48,), 64, plain_order(48)),
]


def bank_of(linears=LINEARS) -> AdapterBank:
    bank = AdapterBank(2, torch.device("cpu"))
    places = [
        Place(tuple(f"{i}.{j}" for j in range(len(layout.widths))), layout.widths, layout.columns)
        for i, layout in enumerate(linears)
    ]
    bank.hold(places, Places(linears, 2))
    return bank


def adapter(seed: int, rank: int, dtype: torch.dtype, *without: str) -> AdapterWeights:
    torch.manual_seed(seed)
    deltas = {
        f"{i}.{j}": Delta(torch.randn(rank, layout.columns).to(dtype), torch.randn(width, rank).to(dtype), 0.5)
        for i, layout in enumerate(LINEARS)
        for j, width in enumerate(layout.widths)
    }
    return AdapterWeights(rank, {name: delta for name, delta in deltas.items() if name not in without})


@pytest.fixture
def bank() -> AdapterBank:
    return bank_of()


@pytest.fixture
def kept(bank, tmp_path):
    files = PackedFiles(tmp_path / "packed", bank, 1 << 30)
    yield files
    files.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [3, 16, 20])
def test_what_is_read_is_what_was_packed(bank, kept, rank, dtype):
    prepared = bank.prepare(adapter(1, rank, dtype, "0.1", "2.0"))
    assert kept.read("a") is None
    kept.keep("a", prepared)
    kept.close()
    found = kept.read("a")
    assert found is not None and found.bytes == prepared.bytes
    assert (found.packed.records == prepared.packed.records).all()
    assert (found.packed.memory.bytes == prepared.packed.memory.bytes).all()


@pytest.mark.parametrize("damage", ["empty", "cut", "kind", "a record", "a number", "records", "another model"])
def test_a_damaged_file_is_packed_again(bank, kept, tmp_path, damage):
    kept.keep("a", bank.prepare(adapter(1, 4, torch.bfloat16)))
    kept.close()
    path = tmp_path / "packed" / "a"
    data = bytearray(path.read_bytes())
    if damage == "kind":
        data[0] ^= 1
    elif damage in ("a record", "a number"):
        data[HEAD + 8 if damage == "a record" else -3] ^= 1
    elif damage == "records":  # with the right sum
        data[HEAD + 8 : HEAD + 16] = (1 << 40).to_bytes(8, "little")
        data[HEAD - 8 : HEAD] = zlib.crc32(data[HEAD:]).to_bytes(8, "little")
    path.write_bytes(data[: {"empty": 0, "cut": len(data) - 1}.get(damage, len(data))])
    other = PackedFiles(tmp_path / "packed", bank_of(LINEARS[:2]), 1 << 30) if damage == "another model" else kept
    assert other.read("a") is None and not path.exists()


def test_what_is_unused_goes_and_bytes_are_bounded(bank, tmp_path):
    prepared = bank.prepare(adapter(1, 4, torch.bfloat16))
    size = sum(len(memoryview(part)) for part in bank.written(prepared))
    kept = PackedFiles(tmp_path, bank, 3 * size)
    for name in "abcd":
        kept.keep(name, prepared)
    kept.close()
    now = time.time()
    for age, path in enumerate(sorted(tmp_path.iterdir(), reverse=True)):
        os.utime(path, (now - age, now - age))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "d"]
    assert kept.read("b") is not None  # which makes it the one used last
    os.utime(tmp_path / "d", (now - KEPT_S - 1,) * 2)
    kept.sweep(time.time())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
    PackedFiles(tmp_path, bank, size).close()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_without_a_disk_adapters_are_packed_each_time(bank, tmp_path):
    (tmp_path / "file").write_text("no folder")
    kept = PackedFiles(tmp_path / "file" / "packed", bank, 1 << 30)
    kept.keep("a", bank.prepare(adapter(1, 4, torch.bfloat16)))
    kept.close()
    assert kept.read("a") is None


def test_another_layout_has_another_form(bank):
    assert bank.form == bank_of().form != bank_of(LINEARS[:2]).form != ""
    assert AdapterBank(1, torch.device("cpu")).form == ""
