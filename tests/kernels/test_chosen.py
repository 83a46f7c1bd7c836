"""Attention to chosen keys is attention in which all other keys are masked."""

from __future__ import annotations

import math

import pytest
import torch

from serve_app.engine.kv_cache import KVShape, LayerShape
from serve_app.engine.request import Request
from serve_app.engine.step import Scheduled, build_batch
from serve_app.kernels import chosen
from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.chosen import attend, chosen_attention, rows_of, window_source
from serve_app.sampling_params import SamplingParams

HEADS, KV_HEADS, DIM = 8, 2, 16
# Tokens of each text, of these computed now, and blocks.
TEXTS = ((70, 70, [1, 3, 5]), (40, 1, [2, 7]), (33, 5, [6, 4]))


@pytest.fixture(params=[False, True], ids=["keys and values", "shared"])
def world(request):
    """A cache full of numbers, NaN where nothing was written, and a batch of prompts and answers."""
    torch.manual_seed(0)
    heads = 1 if request.param else KV_HEADS
    kv = KVShape((LayerShape(heads, DIM, request.param),), torch.float32).allocate(8, "cpu")
    kv.planes[0].fill_(math.nan)
    texts = [Request(str(n), [5] * n, n, SamplingParams(), b"", blocks=blocks) for n, _, blocks in TEXTS]
    before = build_batch([Scheduled(r, 0, len(r.tokens), 1) for r in texts], kv)
    rows = len(before.slots)
    write_kv(kv.layer(0), torch.randn(rows, heads, DIM), torch.randn(rows, heads, DIM), before.slots)
    now = [Scheduled(r, n - count, count, 1) for r, (n, count, _) in zip(texts, TEXTS, strict=True)]
    batch = build_batch(now, kv)
    return kv.layer(0), batch, torch.randn(len(batch.slots), HEADS, DIM)


def masked(q, layer, batch, seen, scale, softcap=None, sinks=None):
    """Row by row, over the keys for which ``seen(request, position)`` has True."""
    request, position = rows_of(batch, len(q), q.device)
    out = torch.empty_like(q)
    for row in range(len(q)):
        r, p = int(request[row]), int(position[row])
        keys, values = (
            side[batch.block_tables[r].long()].transpose(1, 2).flatten(0, 1) for side in (layer[0], layer[-1])
        )
        picked = sorted(seen(row, p))
        group = HEADS // keys.shape[1]
        keys, values = (side[picked].repeat_interleave(group, 1) for side in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row], keys) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(picked)]
        out[row] = torch.einsum("hk,khd->hd", weights, values)
    return out


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 1, HEADS)}], ids=str)
@pytest.mark.parametrize("gathered", [1, 3000, 64 << 20])
def test_rows_see_what_was_picked_for_them(world, options, gathered, monkeypatch):
    layer, batch, q = world
    monkeypatch.setattr(chosen, "GATHERED", gathered)
    picked = torch.stack([torch.randperm(70)[:12] for _ in range(len(q))]).int()
    picked[:, 0], picked[:, 5:8] = 0, -1  # at least one that each may see; fewer than there is room for
    picked[:, 1:5] = torch.where(picked[:, 1:5] == 0, -1, picked[:, 1:5])
    picked[:, 8:] = torch.where(picked[:, 8:] == 0, -1, picked[:, 8:])
    found = chosen_attention(q, layer, batch, picked, scale=0.3, **options)
    wanted = masked(q, layer, batch, lambda row, p: {k for k in picked[row].tolist() if 0 <= k <= p}, 0.3, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_all_keys_picked_are_plain_attention(world):
    layer, batch, q = world
    every = torch.arange(70, dtype=torch.int32).expand(len(q), -1)
    clean = layer.nan_to_num(0.0)
    torch.testing.assert_close(
        chosen_attention(q, layer, batch, every, scale=0.3), paged_attention(q, clean, batch, scale=0.3),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_a_window_is_a_source_like_any_other(world):
    layer, batch, q = world
    request, position = rows_of(batch, len(q), q.device)
    found = attend(q, [window_source(layer, batch, 24, request, position)], scale=0.3)
    wanted = paged_attention(q, layer.nan_to_num(0.0), batch, scale=0.3, window=24)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_float8_cache_is_gathered_as_it_is_read():
    torch.manual_seed(1)
    kv = KVShape((LayerShape(1, DIM, True),), torch.float8_e4m3fn).allocate(3, "cpu")
    text = Request("a", [5] * 40, 40, SamplingParams(), b"", blocks=[1, 2])
    batch = build_batch([Scheduled(text, 0, 40, 1)], kv)
    write_kv(kv.layer(0), (keys := torch.randn(40, 1, DIM)), keys, batch.slots)
    every, q = torch.arange(40, dtype=torch.int32).expand(40, -1), torch.randn(40, HEADS, DIM)
    found = chosen_attention(q, kv.layer(0), batch, every, scale=0.3)
    torch.testing.assert_close(found, paged_attention(q, kv.layer(0), batch, scale=0.3), rtol=1e-3, atol=1e-3)
