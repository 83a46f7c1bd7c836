"""Paged attention in Triton against the naive float64 reference."""

import dataclasses

import pytest
import torch

from serve_app.kernels.gpu.selftest import move
from serve_app.kernels.library.selftest import RandomBatch, random_batch
from tests.kernels.reference import naive_attention
from tests.variants import some

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
# queries, contexts, KV heads, group, head size, window, softcap, sinks
CASES = {
    "decode": ([1, 1, 1], [70, 0, 33], 2, 4, 32, None, None, False),
    "decode, odd group, odd head": ([1, 1], [95, 31], 1, 7, 48, None, None, False),
    "decode, window, cap, sinks": ([1, 1, 1], [150, 12, 64], 2, 3, 16, 40, 20.0, True),
    "prefill": ([40, 3], [0, 0], 2, 2, 32, None, None, False),
    "chunks and decodes": ([33, 1, 5, 1], [31, 64, 90, 0], 2, 3, 64, None, None, False),
    "chunks, window, cap, sinks": ([20, 1, 37], [70, 50, 3], 1, 5, 32, 24, 30.0, True),
    "one key per query": ([5, 1], [40, 0], 1, 1, 16, 1, None, False),
}


def case(name: str, dtype: torch.dtype) -> tuple[RandomBatch, dict]:
    queries, contexts, kv_heads, group, dim, window, softcap, with_sinks = CASES[name]
    b = random_batch(queries, contexts, kv_heads * group, kv_heads, dim, dtype, 0)
    sinks = torch.randn(kv_heads * group) if with_sinks else None
    return b, {"scale": dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}


def compare(name: str, dtype: torch.dtype, device: torch.device, **tuning: int) -> None:
    from serve_app.kernels.gpu import attention, plan

    b, options = case(name, dtype)
    want = naive_attention(b, **options)
    group = CASES[name][3]
    launch = plan.plan_launch(
        requests=len(b.seq_lens), tokens=len(b.q), max_query_len=b.max_query_len, max_seq_len=b.max_seq_len,
        group=group, kv_heads=CASES[name][2], dim=CASES[name][4], item_bytes=dtype.itemsize, units=1,
        shared=99 << 10,
    )  # fmt: skip
    launch = dataclasses.replace(launch, **tuning)
    if b.max_query_len > 1:
        launch = dataclasses.replace(launch, tiles=len(b.q) // (launch.block_m // group) + len(b.seq_lens))
    moved = move(b, device)
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to(device)
    got = attention.paged_attention(moved.q, moved.kv_layer, moved, **options, launch=launch).cpu()
    assert got.dtype is dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", some(CASES, "decode, odd group, odd head"))
def test_equals_the_naive_reference(name: str, device: torch.device) -> None:
    compare(name, torch.float32, device, splits=4)


@pytest.mark.parametrize("name", some(CASES, "decode, window, cap, sinks"))
def test_equals_the_naive_reference_in_one_pass(name: str, device: torch.device) -> None:
    compare(name, torch.float32, device, splits=1)


@pytest.mark.parametrize("heads", some([5, 20, 48], 20))
@pytest.mark.parametrize(
    ("dim", "splits"), some([(24, 1), (24, 4), (40, 1), (64, 4), (576, 1), (576, 2)], (40, 1), (24, 4), names=2)
)
def test_latents_are_keys_and_values_in_one(heads: int, dim: int, splits: int, device: torch.device) -> None:
    """Of all heads; those of one and a half powers of two, and of one."""
    from serve_app.kernels.gpu import attention, plan

    for queries, contexts in (([1, 1, 1], [70, 0, 33]), ([21, 1, 5], [31, 64, 0])):
        b = random_batch(queries, contexts, heads, 1, dim, torch.float32, 0)
        latents = b.kv_layer[:1].clone()
        b.kv_layer[1] = latents[0]
        want = naive_attention(b, dim**-0.5, None, None, None)
        moved = move(b, device)
        group = heads // attention._shared(latents, heads).shape[2]
        assert group <= 16
        launch = plan.plan_launch(
            requests=3, tokens=len(b.q), max_query_len=b.max_query_len, max_seq_len=b.max_seq_len, group=group,
            kv_heads=heads // group, dim=dim, item_bytes=4, units=1, shared=99 << 10,
        )  # fmt: skip
        launch = dataclasses.replace(launch, splits=splits)
        got = attention.paged_attention(moved.q, latents.to(device), moved, scale=dim**-0.5, launch=launch).cpu()
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("block_m", "block_n"), [pytest.param(16, 16, marks=pytest.mark.slow), (32, 128)])
def test_tiles_are_independent_of_the_cache_blocks(block_m: int, block_n: int, device: torch.device) -> None:
    compare("chunks, window, cap, sinks", torch.float32, device, block_m=block_m, block_n=block_n, splits=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    for name in ("decode", "chunks and decodes"):
        compare(name, dtype, device, splits=2)


def test_strided_queries_and_a_shared_prefix(device: torch.device) -> None:
    from serve_app.kernels.gpu import attention

    b = random_batch([1, 6, 1], [70, 65, 90], 4, 2, 32, torch.float32, 3)
    b.block_tables[1, :2] = b.block_tables[0, :2]
    b.block_tables[2, :2] = b.block_tables[0, :2]
    want = naive_attention(b, 0.3, None, None, None)
    moved = move(b, device)
    strided = moved.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    got = attention.paged_attention(strided, moved.kv_layer, moved, scale=0.3)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("units", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_decodes_beside_a_prompt_have_tiles_of_their_own(units: int, device: torch.device, monkeypatch) -> None:
    from serve_app.kernels.gpu import attention, plan

    monkeypatch.setattr(attention, "processors", lambda device: units)  # of the larger number keys are split
    contexts = [70, 0, 33, 5, 64, 31, 1, 90, 12, 50, 20, 300, 2, 65, 9, 40, 7]
    cases = [
        ([1] * 9 + [40, 1, 6], None, None, False),
        ([1] * 9 + [40, 1, 6], 24, 30.0, True),
        ([1] * 15 + [2, 5], None, None, False),  # tiles of 8 that begin in the midst of one
    ]
    for queries, window, softcap, with_sinks in cases:
        b = random_batch(queries, contexts[: len(queries)], 4, 2, 32, torch.float32, 4)
        assert b.decodes >= plan.MIN_DECODES
        sinks = torch.randn(4) if with_sinks else None
        want = naive_attention(b, 0.3, window, softcap, sinks)
        moved = move(b, device)
        got = attention.paged_attention(
            moved.q, moved.kv_layer, moved, scale=0.3, window=window, softcap=softcap,
            sinks=None if sinks is None else sinks.to(device),
        )  # fmt: skip
        torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


def test_the_plan_fills_the_device_and_no_more() -> None:
    from serve_app.kernels.gpu.plan import plan_launch

    shape = dict(group=4, kv_heads=8, dim=128, item_bytes=2, units=132, shared=99 << 10)
    one = plan_launch(requests=1, tokens=1, max_query_len=1, max_seq_len=8192, **shape)
    assert one.tiles * 8 * one.splits >= 132 and one.block_m == 16
    assert plan_launch(requests=256, tokens=256, max_query_len=1, max_seq_len=8192, **shape).splits == 1
    # A short context is not worth splitting.
    assert plan_launch(requests=1, tokens=1, max_query_len=1, max_seq_len=100, **shape).splits == 1
    prefill = plan_launch(requests=4, tokens=4096, max_query_len=1024, max_seq_len=1024, **shape)
    assert prefill.block_m == 128 and prefill.splits == 1
    assert prefill.tiles == 4096 // 32 + 4
    # More shared memory holds larger tiles of keys.
    large = plan_launch(requests=1, tokens=512, max_query_len=512, max_seq_len=8192, **shape | {"shared": 227 << 10})
    assert (prefill.block_n, large.block_n) == (64, 128)


@pytest.mark.slow
def test_the_tuning_script_runs(device: torch.device, capsys) -> None:
    import json

    from benchmarks.gpu import gpu_tune

    arguments = ["--device", device.type, "--heads", "4,2,32", "--rounds", "1", "--json"]
    assert gpu_tune.main([*arguments, "--dtype", "bfloat16" if device.type == "cuda" else "float32"]) == 0
    cases = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert all(0 < case["best_s"] <= case["plan_s"] and case["tried"] > 1 for case in cases.values())
