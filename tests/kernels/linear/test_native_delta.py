"""Adapters of one linear in C++ give what torch's products give, whatever the shape, the rows and the threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from serve_app.kernels.adapted import adapter_linear
from serve_app.kernels.linear import packing, places
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, Rows
from serve_app.kernels.linear.native_delta import NativeAdapterLinear
from serve_app.kernels.linear.panels import panel_library

pytestmark = pytest.mark.skipif(panel_library() is None, reason="needs a compiler and AVX512_BF16")
PLACES = 4


class Base(Linear):
    dtype = torch.bfloat16

    def __init__(self, n: int, k: int) -> None:
        self.weight = (torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * k**-0.5).bfloat16()

    def __call__(self, x, batch=None, rows=None):
        return F.linear(x, self.weight)


@dataclass
class Batch:
    adapters: torch.Tensor | None


@dataclass
class Matrices:
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def matrices(n: int, k: int, rank: int, seed: int, dtype=torch.bfloat16) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    a = (torch.randn(rank, k, generator=generator) * k**-0.5).to(dtype)
    return Matrices(a, torch.randn(n, rank, generator=generator).to(dtype), 1.5)


def pair(widths: tuple[int, ...], k: int) -> tuple[NativeAdapterLinear, AdapterLinear, Base]:
    """In C++ and in torch, with adapters of several ranks and kinds in places 1 to 3; place 4 is empty."""
    base, rows = Base(sum(widths), k), Rows()
    native = adapter_linear(base, PLACES, rows, widths, k, torch.device("cpu"))
    plain = AdapterLinear(base, PLACES, Rows(), widths, torch.device("cpu"))
    assert isinstance(native, NativeAdapterLinear)
    for place, (rank, dtype) in enumerate([(16, torch.bfloat16), (3, torch.float32), (40, torch.bfloat16)], start=1):
        own = [matrices(n, k, rank, place + 10 * i, dtype) for i, n in enumerate(widths)]
        if place == 3:
            own[0] = own[0] if len(own) == 1 else None
        for linear in (native, plain):
            packed = linear.pack(own)
            assert packed.bytes > 0
            linear.put(place, packed)
    return native, plain, base


@pytest.mark.parametrize(
    ("widths", "k"), [((64,), 32), ((7,), 6), ((100,), 130), ((1,), 2), ((64, 32, 32), 64), ((200,), 1100)]
)
@torch.inference_mode()
def test_equals_torch(widths, k, threads) -> None:
    native, plain, base = pair(widths, k)
    for count in (1, 2, 5, 9, 33):
        x = torch.randn(count, k, generator=torch.Generator().manual_seed(count)).bfloat16()
        batch = Batch(torch.tensor([(3 * i + count) % 5 for i in range(count)]))
        found, wanted, without = native(x, batch), plain(x, batch), base(x)
        torch.testing.assert_close(found.float(), wanted.float(), atol=3e-2, rtol=1e-2)
        bare = (batch.adapters == 0) | (batch.adapters == 4)
        assert torch.equal(found[bare], without[bare])
        if count > 4:
            assert (found.float() - without.float()).abs().max() > 0.3
        # Some rows of a batch, and rows of padding behind those of a batch.
        some = torch.arange(0, count, 2)
        assert torch.equal(native(x[some], batch, some), found[some])
        more = torch.cat([x, torch.zeros(3, k).bfloat16()])
        assert torch.equal(native(more, batch)[:count], found)
    assert torch.equal(native(x, Batch(None)), without)


@torch.inference_mode()
def test_a_rows_result_does_not_depend_on_the_others(threads) -> None:
    native, _, _ = pair((130,), 1090)
    x = torch.randn(60, 1090, generator=torch.Generator().manual_seed(0)).bfloat16()
    adapters = torch.tensor([i % 4 for i in range(60)])
    alone = torch.cat([native(x[i : i + 1], Batch(adapters[i : i + 1])) for i in range(60)])
    base_alone = torch.cat([native(x[i : i + 1], Batch(None)) for i in range(60)])
    together = native(x, Batch(adapters))
    # torch's own products round otherwise for other numbers of rows: compare what was added to the same base.
    same = (native.inner(x) == base_alone).all(dim=1)
    assert same.any() and torch.equal(together[same], alone[same])


@torch.inference_mode()
def test_places_are_exchanged_and_cleared_and_must_be_there() -> None:
    native, _, base = pair((64,), 32)
    x, batch = torch.ones(2, 32).bfloat16(), Batch(torch.tensor([1, 4]))
    before = native(x, batch)
    native.put(4, native.pack([matrices(64, 32, 16, 1)]))
    both = native(x, batch)
    assert torch.equal(both[0], before[0]) and torch.equal(both[1], both[0])
    native.put(1, None)
    assert torch.equal(native(x, batch)[0], base(x)[0])
    assert native.pack([None]) is None
    for place in (-1, PLACES + 1, 1 << 40):
        with pytest.raises(ValueError, match="place for adapters that there is not"):
            native(x, Batch(torch.tensor([0, place])))
    with pytest.raises(ValueError, match="a linear with adapters gets"):
        native(x[:1], batch)


def test_sizes_that_do_not_go_are_for_torch() -> None:
    for widths, k, dtype in (((8,), 7, torch.bfloat16), ((8, 24), 8, torch.bfloat16), ((64,), 32, torch.float32)):
        base = Base(sum(widths), k)
        base.dtype = dtype
        found = adapter_linear(base, PLACES, Rows(), widths, k, torch.device("cpu"))
        assert type(found) is AdapterLinear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [16, 4, 32, 5])
def test_packing_in_cpp_and_in_numpy_is_the_same(rank, dtype, monkeypatch) -> None:
    layout = packing.LinearLayout((48, 16, 100), 34, places_order(164))
    own = [matrices(48, 34, rank, 1, dtype), None, matrices(100, 34, rank, 2, dtype)]
    packed = places.Places([layout], 1).prepare([own])
    monkeypatch.setattr(packing, "cpu_library", lambda: None)
    plain = places.Places([layout], 1).prepare([own])
    assert np.array_equal(packed.records, plain.records) and np.array_equal(packed.memory.bytes, plain.memory.bytes)
    assert packed.memory.bytes.any()


@pytest.mark.parametrize("library", ["cpp", "numpy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [16, 5])
def test_a_number_that_is_not_finite_is_seen_wherever_it_is(rank, dtype, library, monkeypatch) -> None:
    if library == "numpy":
        monkeypatch.setattr(packing, "cpu_library", lambda: None)
    held = places.Places([packing.LinearLayout((100,), 34, places_order(100))], 1)
    for matrix, row, column in (("a", 0, 0), ("a", -1, -1), ("b", 99, rank - 1), ("b", 17, 1)):
        for value in (float("nan"), float("inf"), float("-inf")):
            own = matrices(100, 34, rank, 1, dtype)
            getattr(own, matrix)[row, column] = value
            assert held.pack(held.recipe([[own]])) is None
            with pytest.raises(ValueError, match="not finite"):
                held.prepare([[own]])
    largest = matrices(100, 34, rank, 1, dtype)
    largest.a[:] = torch.finfo(dtype).max
    assert held.pack(held.recipe([[largest]])) is not None


def test_memory_of_an_adapter_that_is_gone_is_taken_for_the_next() -> None:
    """It is as if it were new, however little of it the next one fills."""
    layout = packing.LinearLayout((48, 20000), 1000, places_order(20048))
    held = places.Places([layout], 1)

    def made(rank: int, seed: int) -> list[Matrices | None]:
        return [None if seed else matrices(48, 1000, rank, 1), matrices(20000, 1000, rank, 2 + seed)]

    other = places.Places([layout], 1).prepare([made(60, 1)])
    fresh = other.memory.bytes.copy()
    first = held.prepare([made(66, 0)])
    at, size = first.memory.at, first.memory.size
    second = held.prepare([made(60, 0)])
    assert second.memory.at != at and size >= 1 << 20
    held.put(1, first)
    del first
    held.put(1, second)  # nobody has the first one any more
    third = held.prepare([made(60, 1)])
    assert third.memory.at == at and np.array_equal(third.memory.bytes, fresh)
    # One that is much smaller, or read while none is there, has memory of its own.
    assert held.prepare([made(20, 0)]).memory.at not in (at, second.memory.at)


def places_order(rows: int) -> np.ndarray:
    order = np.arange(-(-rows // 64) * 64, dtype=np.int64)
    order[rows:] = -1
    return order
