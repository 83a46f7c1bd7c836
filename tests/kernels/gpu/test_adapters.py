"""Adapters in Triton: tiles of rows, two launches for all of them, and tables that places are changed in."""

import dataclasses

import pytest
import torch

from serve_app.kernels.gpu import selftest
from serve_app.kernels.gpu.selftest import AdaptedBatch, Matrices
from serve_app.kernels.linear.base import PlainLinear
from serve_app.kernels.linear.delta import AdapterLinear, Rows
from serve_app.kernels.linear.device_delta import DeviceAdapterLinear
from serve_app.kernels.linear.tiles import TILE_ROWS, tile_rows
from tests.variants import some


@pytest.fixture(scope="module")
def triton():
    from serve_app.kernels.gpu.backend import triton_operators

    return triton_operators()


@pytest.mark.parametrize("places", [[0], [1], [3, 3, 3], [2, 0, 1, 2, 2], [4] * 16, [4] * 17, [1, 2] * 40, [0] * 33])
def test_every_row_with_an_adapter_is_in_one_tile_of_it(places, device: torch.device) -> None:
    most = 4
    tiles = tile_rows(torch.tensor(places, device=device), most)
    assert len(tiles.place) == len(tiles.first) == len(tiles.count) == min(len(places), most) + len(places) // TILE_ROWS
    found = []
    for place, first, count in zip(tiles.place.tolist(), tiles.first.tolist(), tiles.count.tolist(), strict=True):
        assert 0 <= count <= TILE_ROWS and 0 <= first < len(places) and 0 <= place <= most
        rows = tiles.order[first : first + count].tolist()
        assert len(rows) == count and all(places[row] == place > 0 for row in rows)
        found += rows
    assert sorted(found) == [row for row, place in enumerate(places) if place]


@pytest.mark.parametrize("dtype", list(selftest.TOLERANCE))
def test_equal_to_torch(triton, dtype: torch.dtype, device: torch.device) -> None:
    """By the check that a GPU runs when it is first used."""
    assert selftest.check_adapters(triton, dtype, device) < selftest.TOLERANCE[dtype]


def test_the_check_finds_a_wrong_kernel(triton, device: torch.device) -> None:
    def wrong(out, *rest):
        triton.add_deltas(out, *rest)
        out += 0.5

    for broken in (wrong, lambda *_: None):
        with pytest.raises(RuntimeError, match="adapters in .* differs"):
            selftest.check_adapters(dataclasses.replace(triton, add_deltas=broken), torch.float32, device)


def linears(triton, device, n: int, k: int) -> tuple[DeviceAdapterLinear, AdapterLinear]:
    base = PlainLinear(torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(device) * 0.1, None)
    return (
        DeviceAdapterLinear(triton.add_deltas, base, 3, Rows(), (n,), device),
        AdapterLinear(base, 3, Rows(), (n,), device),
    )


def adapter(n: int, k: int, rank: int, seed: int) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    return Matrices(torch.randn(rank, k, generator=generator) * 0.1, torch.randn(n, rank, generator=generator), 2.0)


@pytest.mark.parametrize(
    ("n", "k", "rank"), some([(1, 1, 1), (64, 600, 16), (65, 63, 33), (7, 1030, 256)], (1, 1, 1), (65, 63, 33), names=3)
)
def test_odd_sizes(triton, device: torch.device, n: int, k: int, rank: int) -> None:
    pair = linears(triton, device, n, k)
    for linear in pair:
        linear.put(2, linear.pack([adapter(n, k, rank, 1)]))
    x = torch.randn(18, k, generator=torch.Generator().manual_seed(2)).to(device)
    batch = AdaptedBatch(torch.tensor([2] * 17 + [1], device=device))
    got, want = (linear(x, dataclasses.replace(batch)) for linear in pair)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_what_is_put_into_a_place_counts_from_the_next_call(triton, device: torch.device) -> None:
    """With the same launches: a captured graph has them already."""
    linear, _ = linears(triton, device, 64, 64)
    x, batch = torch.ones(2, 64, device=device), AdaptedBatch(torch.tensor([1, 0], device=device))
    base = linear.inner(x, batch)
    assert torch.equal(linear(x, batch), base)
    packed = linear.pack([adapter(64, 64, 16, 1)])
    assert packed is not None and packed.bytes == 4 * 2 * 16 * 64
    linear.put(1, packed)
    first = linear(x, batch)
    assert not torch.allclose(first[0], base[0], atol=0.1) and torch.equal(first[1], base[1])
    linear.put(1, linear.pack([adapter(64, 64, 40, 2)]))
    assert not torch.allclose(linear(x, batch)[0], first[0], atol=0.1)
    linear.put(1, None)
    assert torch.equal(linear(x, batch), base)
    assert linear.pack([None]) is None
