"""FlashAttention beside our kernel: what it is called with, what it is not asked, and when it is chosen.

torch's ``varlen_attn`` runs on CUDA only; where there is none a reference with its signature and its documented meaning
takes its place, and only the tests marked ``gpu`` call the real one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from serve_app.kernels.gpu.choice import Heads, check, choose_attention, compare
from serve_app.kernels.gpu.selftest import TOLERANCE, move
from serve_app.kernels.library.selftest import random_batch
from serve_app.kernels.reference.operators import TORCH

HEADS = Heads(4, 2, 32, torch.bfloat16, torch.bfloat16)


def reference(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False,
              seqused_k=None, block_table=None):  # fmt: skip
    """``torch.nn.attention.varlen.varlen_attn`` of torch 2.12 and later, one query at a time."""
    assert enable_gqa == (q.shape[1] != k.shape[-2])
    out = torch.empty_like(q)
    for r in range(len(cu_seq_q) - 1):
        rows = range(int(cu_seq_q[r]), int(cu_seq_q[r + 1]))
        if block_table is None:
            keys, values = (t[int(cu_seq_k[r]) : int(cu_seq_k[r + 1])] for t in (k, v))
        else:
            keys, values = (t[block_table[r].long()].flatten(0, 1)[: int(seqused_k[r])] for t in (k, v))
        assert len(rows) <= max_q and len(keys) <= max_k
        group = q.shape[1] // k.shape[-2]
        keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
        for row in rows:
            # The last query stands at the last key.
            position = len(keys) - (rows[-1] - row) - 1
            left, right = window_size
            first = 0 if left < 0 else max(0, position - left)
            last = len(keys) if right < 0 else min(len(keys), position + right + 1)
            score = torch.einsum("hd,khd->hk", q[row].float(), keys[first:last]) * scale
            out[row] = torch.einsum("hk,khd->hd", score.softmax(-1), values[first:last]).to(q.dtype)
    return out


def first_form(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """The same in torch 2.10: no window but the causal one, no scale but the usual one."""
    window = (-1, 0) if is_causal else (-1, -1)
    grouped = query.shape[1] != key.shape[1]
    return reference(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=query.shape[2] ** -0.5, window_size=window,
        enable_gqa=grouped,
    )  # fmt: skip


def refuses(*args, **options):
    raise AssertionError("this batch is for the other one")


def flash(function=reference, *, paged=False, other=refuses):
    import inspect

    from serve_app.kernels.gpu.flash import FlashAttention

    return FlashAttention(function, frozenset(inspect.signature(function).parameters), paged, other)


@pytest.mark.parametrize("paged", [True, False])
def test_prompts_chunks_and_windows_equal_torch(paged, device):
    # Without a GPU the reference computes and Triton's interpreter copies keys.
    if device.type == "cpu":
        assert check(flash(paged=paged, other=TORCH.attention), HEADS, device) < TOLERANCE[torch.bfloat16]


def test_the_first_form_of_the_signature(device):
    if device.type == "cpu":
        b = random_batch([130, 70], [0, 45], 4, 2, 32, torch.bfloat16, 0)
        got = flash(first_form)(b.q, b.kv_layer, b, scale=32**-0.5, window=1000)
        want = TORCH.attention(b.q, b.kv_layer, b, scale=32**-0.5)
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        asked = []
        taken = flash(first_form, other=lambda *args, **options: asked.append(options))
        taken(b.q, b.kv_layer, b, scale=0.3)  # neither this scale
        taken(b.q, b.kv_layer, b, scale=32**-0.5, window=20)  # nor a window can be said
        assert [options["window"] for options in asked] == [None, 20]


@pytest.mark.parametrize(
    ("queries", "contexts", "dtype", "options"),
    [
        ([1, 1], [70, 300], torch.bfloat16, {}),
        ([5, 1, 3], [70, 30, 0], torch.bfloat16, {}),
        ([300], [0], torch.bfloat16, {"softcap": 30.0}),
        ([300], [0], torch.bfloat16, {"sinks": torch.zeros(4)}),
        ([300], [0], torch.float32, {}),
        # Copying the keys of these would cost as much as attending to them.
        ([100], [2000], torch.bfloat16, {}),
    ],
    ids=["decode", "verification", "soft cap", "sinks", "float32", "long prefix"],
)
def test_what_is_not_for_it_goes_to_the_other(queries, contexts, dtype, options):
    b = random_batch(queries, contexts, 4, 2, 32, dtype, 0)
    attention = flash(refuses, other=TORCH.attention)
    got = attention(b.q, b.kv_layer, b, scale=0.2, **options)
    assert torch.equal(got, TORCH.attention(b.q, b.kv_layer, b, scale=0.2, **options))


def test_a_float8_cache_goes_to_the_other():
    b = random_batch([300], [0], 4, 2, 32, torch.bfloat16, 0)
    cache = b.kv_layer.to(torch.float8_e4m3fn)
    got = flash(refuses, other=TORCH.attention)(b.q, cache, b, scale=0.2)
    assert got.isfinite().all()


def test_keys_are_copied_one_behind_the_other(device):
    from serve_app.kernels.gpu.flash import copy_keys

    b = random_batch([40, 1, 3], [9, 64, 31], 4, 2, 48, torch.float32, 1)
    moved = move(b, device)
    keys, values, start = copy_keys(moved.kv_layer, moved)
    assert start.tolist() == [0, 49, 114, 148] and start.dtype == torch.int32
    for r, length in enumerate(b.seq_lens.tolist()):
        where = torch.arange(length)
        block = b.block_tables[r].long()[where // 32]
        for plane, got in ((0, keys), (1, values)):
            want = b.kv_layer[plane][block, :, where % 32]
            assert torch.equal(got[start[r] : start[r + 1]].cpu(), want)


def clock(seconds_of):
    """Stands for time on a device, by what is called."""

    def measure(run):
        return seconds_of[run.func]

    return measure


def test_it_is_chosen_where_it_is_right_and_faster(monkeypatch, caplog):
    cpu = torch.device("cpu")
    right, ours = flash(paged=True, other=TORCH.attention), TORCH.attention
    chosen, why = compare(ours, right, "FA3, paged", HEADS, cpu, clock({ours: 2.0, right: 1.0}))
    assert chosen is right and "2.00 times as fast" in why
    chosen, why = compare(ours, right, "FA3, paged", HEADS, cpu, clock({ours: 1.0, right: 1.0}))
    assert chosen is ours and "is 1.00 times as fast" in why
    assert not caplog.records

    def off_by_one(*args, window_size, **options):
        return reference(*args, window_size=(-1, -1), **options)

    wrong = dataclasses.replace(right, varlen=off_by_one)
    chosen, why = compare(ours, wrong, "FA3, paged", HEADS, cpu, clock({ours: 2.0, wrong: 1.0}))
    assert chosen is ours and "differs from torch" in why
    assert "FA3, paged" in caplog.text
    narrow = dataclasses.replace(HEADS, cache=torch.float8_e4m3fn)
    assert compare(ours, right, "FA3", narrow, cpu, clock({}))[0] is ours


@pytest.mark.slow
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_our_kernel_passes_on_the_heads_of_models(cache, device):
    from serve_app.kernels.gpu.attention import paged_attention

    if cache is torch.bfloat16 or device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9):
        heads = Heads(4, 2, 96, torch.bfloat16, cache)
        assert check(paged_attention, heads, device) < TOLERANCE[torch.bfloat16]


def test_there_is_no_choice_without_a_gpu():
    assert choose_attention(TORCH, HEADS, torch.device("cpu")) == (TORCH.attention, "")


def test_what_this_torch_has(monkeypatch):
    """Its signature is known, and what cannot be activated is said."""
    from serve_app.kernels.gpu import flash as module

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv(module.ENVIRONMENT, raising=False)
    cuda = torch.device("cuda")
    found, name = module.find(TORCH.attention, cuda)
    assert name == "FA2, packed" and not found.paged
    assert found.options(torch.empty(1, 4, 32), torch.empty(2, 1, 2, 32, 32), 0.2, None) is not None
    for value, text in (("off", "off"), ("FA3", "flash_attn_interface"), ("FA9", "unknown")):
        monkeypatch.setenv(module.ENVIRONMENT, value)
        with pytest.raises(module.Unavailable, match=text):
            module.find(TORCH.attention, cuda)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [Heads(32, 8, 128, *[torch.bfloat16] * 2), Heads(8, 8, 64, *[torch.float16] * 2)])
def test_torchs_own_equals_torch(heads):
    from serve_app.kernels.gpu import flash as module

    device = torch.device("cuda")
    candidate, name = module.find(TORCH.attention, device)
    assert check(candidate, heads, device) < TOLERANCE[heads.dtype], name
