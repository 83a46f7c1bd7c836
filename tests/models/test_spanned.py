"""Attention that sees whole pictures, beside a dense mask; and steps that never end inside of one."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.kv_cache import KVShape, LayerShape
from serve_app.engine.request import EmbeddedSpan, Request, unbroken
from serve_app.engine.step import Scheduled, build_batch
from serve_app.kernels.attention import write_kv
from serve_app.models.spanned import spanned_attention
from serve_app.sampling_params import SamplingParams

HEADS, KV_HEADS, DIM = 4, 2, 32
SPANS = [(5, 12), (40, 30), (70, 7)]


def request(length: int, spans: list[tuple[int, int]], first_block: int) -> Request:
    made = Request(str(first_block), [3] * length, length, SamplingParams(), b"root")
    made.embedded = [EmbeddedSpan(start, count, b"x", lambda: torch.zeros(0, 8), True) for start, count in spans]
    made.blocks = list(range(first_block, first_block + -(-length // 32)))
    return made


@pytest.mark.parametrize("window", [None, 16, 200])
def test_rows_see_what_a_mask_would_let_them_see(window):
    """From the beginning, and from the middle of a picture on, beside a request without any."""
    torch.manual_seed(0)
    long, short, plain = request(90, SPANS, 1), request(33, [(4, 20)], 4), request(50, [], 6)
    scheduled = [Scheduled(long, 45, 45, 1), Scheduled(short, 0, 33, 1), Scheduled(plain, 20, 30, 1)]
    kv = KVShape((LayerShape(KV_HEADS, DIM),), torch.float32).allocate(9, "cpu")
    batch, layer = build_batch(scheduled, kv), kv.layer(0)
    keys, values = {}, {}
    for one in (long, short, plain):
        k, v = torch.randn(2, len(one.tokens), KV_HEADS, DIM)
        slots = torch.tensor([one.blocks[i // 32] * 32 + i % 32 for i in range(len(one.tokens))])
        write_kv(layer, k, v, slots)
        keys[one.id], values[one.id] = k, v
    q = torch.randn(len(batch.input_ids), HEADS, DIM)
    got = spanned_attention(q, layer, batch, scale=DIM**-0.5, window=window)
    at = 0
    for item in scheduled:
        k, v = (x[item.request.id].repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        for position in range(item.start, item.start + item.count):
            end = next((s.end for s in item.embedded if s.start <= position < s.end), position + 1)
            first = 0 if window is None else max(0, position - window + 1)
            scores = torch.einsum("hd,khd->hk", q[at], k[first:end]) * DIM**-0.5
            want = torch.einsum("hk,khd->hd", scores.softmax(-1), v[first:end])
            torch.testing.assert_close(got[at], want, atol=1e-5, rtol=1e-4)
            at += 1


def test_a_step_ends_before_a_picture_or_behind_it():
    made = request(90, SPANS, 1)
    assert [unbroken(made, 0, n) for n in (0, 5, 6, 16, 17, 40, 60, 75, 90)] == [0, 5, 5, 5, 17, 40, 40, 70, 90]
    # However small the budget is.
    assert unbroken(made, 5, 3) == 12 and unbroken(made, 50, 1) == 20
