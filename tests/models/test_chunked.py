"""Attention within chunks against attention with the mask that says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.kv_cache import KVShape
from serve_app.engine.request import Request
from serve_app.engine.step import Scheduled, build_batch
from serve_app.kernels.attention import write_kv
from serve_app.models.chunked import chunked_attention
from serve_app.sampling_params import SamplingParams


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, chunk: int) -> torch.Tensor:
    """Queries [Q, Hq, D] from position ``first`` on over all keys [N, Hkv, D] of one request."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    at, keys = torch.arange(len(q))[:, None] + first, torch.arange(len(k))[None]
    seen = (keys <= at) & (keys >= at // chunk * chunk)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    chunk=st.sampled_from([1, 5, 16, 31, 32, 33, 64, 96]),
    pieces=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    dim=st.sampled_from([8, 16, 24]),
)
def test_chunks_are_those_of_the_mask(chunk, pieces, heads, dim):
    torch.manual_seed(chunk)
    kv = KVShape.uniform(1, heads[1], dim, torch.float32).allocate(1 + 8 * len(pieces), "cpu")
    scheduled, texts = [], []
    for index, (start, count) in enumerate(pieces):
        tokens = [1] * (start + count)
        blocks = list(range(1 + 8 * index, 9 + 8 * index))
        request = Request(str(index), tokens, len(tokens), SamplingParams(), root=b"", blocks=blocks)
        k, v = torch.randn(2, len(tokens), heads[1], dim)
        slots = torch.tensor([blocks[i // 32] * 32 + i % 32 for i in range(len(tokens))])
        write_kv(kv.layer(0), k, v, slots)
        scheduled.append(Scheduled(request, start, count, 1))
        texts.append((k, v))
    batch = build_batch(scheduled, kv)
    q = torch.randn(len(batch.input_ids), heads[0], dim)
    got = chunked_attention(q, kv.layer(0), batch, chunk, scale=dim**-0.5)
    at = 0
    for (start, count), (k, v) in zip(pieces, texts, strict=True):
        torch.testing.assert_close(
            got[at : at + count], dense(q[at : at + count], k, v, start, chunk), atol=1e-5, rtol=1e-4
        )
        at += count


@pytest.mark.parametrize("chunk", [32, 48])
def test_a_window_within_a_chunk_is_kept(chunk):
    kv = KVShape.uniform(1, 1, 16, torch.float32).allocate(4, "cpu")
    k, v = torch.randn(2, 90, 1, 16)
    write_kv(kv.layer(0), k, v, torch.arange(32, 122))
    request = Request("x", [1] * 90, 90, SamplingParams(), root=b"", blocks=[1, 2, 3])
    batch = build_batch([Scheduled(request, 0, 90, 1)], kv)
    q = torch.randn(90, 1, 16)
    got = chunked_attention(q, kv.layer(0), batch, chunk, scale=0.25, window=1)
    torch.testing.assert_close(got, v, atol=1e-5, rtol=1e-4)  # each token sees itself alone
