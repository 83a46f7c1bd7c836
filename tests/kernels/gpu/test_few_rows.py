"""Products of a few rows: equal to torch's in every tile, and chosen only where they are right and faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from serve_app.kernels.gpu import few_rows
from serve_app.kernels.gpu.few_rows import TILES, FewRowsLinear, choose, multiply, served_by


def weight_of(n: int, k: int, device: torch.device) -> torch.Tensor:
    return (torch.randn(n, k) * k**-0.5).to(device, torch.bfloat16)


@pytest.mark.parametrize("tile", [tile for tiles in TILES.values() for tile in tiles], ids=str)
def test_every_tile_gives_what_torch_gives(tile, device):
    weight, bias = weight_of(2 * tile.n, 2 * tile.k, device), torch.randn(2 * tile.n).to(device, torch.bfloat16)
    for rows in {1, tile.rows // 2 + 1, tile.rows}:
        # Rows that lie apart, as those of a batch of which some are wanted do.
        x = torch.randn(rows, 2 * weight.shape[1]).to(device, torch.bfloat16)[:, : weight.shape[1]]
        for given in (None, bias):
            got, want = multiply(x, weight, given, tile), F.linear(x.float(), weight.float(), None)
            want = want if given is None else want + given.float()
            assert float((got.float() - want).norm() / want.norm()) < 0.01


def test_rows_go_to_the_smallest_tiles_that_hold_them():
    assert [served_by(rows) for rows in (1, 2, 16)] == [1, 16, 16] and few_rows.MOST_ROWS == 16


def test_what_is_faster_is_chosen_by_shape_and_rows(device):
    """The clock is a given one: cuBLAS takes 1 s, the second tile for one row half of that."""
    wide = [FewRowsLinear(weight_of(128, 1024, device), None) for _ in range(3)]
    odd = FewRowsLinear(weight_of(100, 72, device), None)  # no tile fits
    times = iter([1.0, 1.2, 0.5] + [1.0, 0.99, 0.98] + [1.0, 1.0])
    found = choose([*wide, odd], lambda run: next(times))
    assert next(times, None) is None
    assert wide[0].tiles == {1: TILES[1][1]}  # 2 % faster is not enough
    assert all(linear.tiles == wide[0].tiles for linear in wide) and odd.tiles == {}
    assert list(found.gains.values()) == [2.0] and "cases: 1" in str(found)
    for rows in (1, 9, 20):
        x = torch.randn(rows, 1024).to(device, torch.bfloat16)
        want = F.linear(x, wide[0].weight)
        assert float((wide[0](x) - want).float().norm() / want.float().norm()) < 0.01
    x = torch.randn(3, 72).to(device, torch.bfloat16)
    assert torch.equal(odd(x), F.linear(x, odd.weight))


def test_a_wrong_tile_is_never_chosen(device, monkeypatch):
    linear = FewRowsLinear(weight_of(128, 1024, device), None)
    monkeypatch.setattr(few_rows, "multiply", lambda x, w, b, tile: F.linear(x, w, b) * 1.1)
    assert not choose([linear], lambda run: 1.0).gains and not linear.tiles

    def broken(x, w, b, tile):
        raise RuntimeError("out of resource")

    monkeypatch.setattr(few_rows, "multiply", broken)
    assert str(choose([linear], lambda run: 1.0)) == "few rows by cuBLAS"


def test_float32_stays_with_torch(device):
    linear = FewRowsLinear(torch.randn(128, 1024, device=device), None)
    assert not choose([linear], lambda run: 0.0).gains


def test_a_tile_fits_whole_weights_only():
    tile = TILES[16][0]
    assert tile.fits(torch.empty(2 * tile.n, tile.k)) and not tile.fits(torch.empty(tile.n + 1, tile.k))
    assert not replace(tile, k=3 * tile.k).fits(torch.empty(tile.n, tile.k))
