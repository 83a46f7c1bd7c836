"""Both paged attention paths against the naive float64 reference, on random mixed batches."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.library import native
from serve_app.kernels.library.native import Library
from serve_app.kernels.library.selftest import RandomBatch, random_batch
from serve_app.kernels.reference.attention import paged_attention_torch, write_kv_torch
from tests.kernels.reference import naive_attention

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.5e-2}


@dataclasses.dataclass(slots=True)
class Case:
    queries: list[int]
    contexts: list[int]
    kv_heads: int
    group: int
    dim: int
    window: int | None
    softcap: float | None
    sinks: bool
    seed: int

    def build(self, dtype: torch.dtype) -> tuple[RandomBatch, dict]:
        heads = self.kv_heads * self.group
        b = random_batch(self.queries, self.contexts, heads, self.kv_heads, self.dim, dtype, self.seed)
        sinks = torch.randn(heads, generator=torch.Generator().manual_seed(self.seed)) if self.sinks else None
        return b, {"scale": self.dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks": sinks}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    requests = draw(st.integers(1, 4))
    return Case(
        queries=draw(st.lists(st.sampled_from([1, 1, 2, 5, 33, 40]), min_size=requests, max_size=requests)),
        contexts=draw(st.lists(st.sampled_from([0, 1, 31, 32, 63, 90]), min_size=requests, max_size=requests)),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 7, 8])),
        dim=draw(st.sampled_from([16, 32, 48, 64, 128])),
        window=draw(st.sampled_from([None, 1, 20, 32, 50])),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases())
def test_torch_path_equals_the_naive_reference(case: Case) -> None:
    for dtype in TOLERANCE:
        b, options = case.build(dtype)
        check(paged_attention_torch(b.q, b.kv_layer, b, **options), naive_attention(b, **options), dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), count=st.sampled_from([1, 2, 3]))
def test_cpp_path_equals_torch(library: Library, case: Case, count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            b, options = case.build(dtype)
            got = native.attention(library, b.q, b.kv_layer, b.query_start, b.seq_lens, b.block_tables, **options)
            wide = dataclasses.replace(b, q=b.q.double(), kv_layer=b.kv_layer.double())
            check(got, paged_attention_torch(wide.q, wide.kv_layer, wide, **options), dtype)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "context"), [(1, 3000), (4, 2000), (300, 500)])
def test_one_long_request_is_split_over_threads(
    library: Library, threads: int, dtype: torch.dtype, queries: int, context: int
) -> None:
    b = random_batch([queries], [context], 3, 1, 64, dtype, 1)
    got = paged_attention(b.q, b.kv_layer, b, scale=0.2)
    check(got, paged_attention_torch(b.q.double(), b.kv_layer.double(), b, scale=0.2), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_queries_and_shared_blocks(library: Library, dtype: torch.dtype) -> None:
    b = random_batch([1, 6, 1], [70, 65, 90], 4, 2, 32, dtype, 3)
    b.block_tables[1, :2] = b.block_tables[0, :2]  # a common prefix
    b.block_tables[2, :2] = b.block_tables[0, :2]
    # [1, Hq, T, D], as attention functions of transformers receive it, seen as [T, Hq, D].
    strided = b.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    want = naive_attention(b, 0.3, None, None, None)
    check(paged_attention(strided, b.kv_layer, b, scale=0.3), want, dtype)
    check(paged_attention_torch(strided, b.kv_layer, b, scale=0.3), want, dtype)


def test_torch_path_pads_decodes_alike() -> None:
    """The padded form that GPUs take, driven on CPU through its own function."""
    from serve_app.kernels.reference.attention import _attend

    b = random_batch([1, 1, 1], [70, 0, 31], 4, 2, 32, torch.float32, 5)
    got = _attend(b.q.unsqueeze(1), b.kv_layer.nan_to_num(7.0), b.block_tables, b.seq_lens, 0.3, 40, None, None)[:, 0]
    check(got, naive_attention(b, 0.3, 40, None, None), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_kv_equals_torch_and_leaves_the_rest(library: Library, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 5, 3, 32, 24, generator=generator).to(dtype)
    rows = torch.randn(2, 3, 7, 24, generator=generator).to(dtype).transpose(1, 2)  # strided [T, Hkv, D]
    slots = torch.tensor([0, 31, 32, 159, 100, 64, 95])
    want = cache.clone()
    for t, slot in enumerate(slots.tolist()):
        want[:, slot // 32, :, slot % 32] = rows[:, t]
    for write in (write_kv, write_kv_torch):
        got = cache.clone()
        write(got, rows[0], rows[1], slots)
        assert torch.equal(got, want)


def test_contradictory_batches_are_refused(library: Library) -> None:
    b = random_batch([1], [40], 2, 1, 16, torch.float32, 0)
    with pytest.raises(ValueError, match="outside the cache"):
        paged_attention(b.q, b.kv_layer, dataclasses.replace(b, block_tables=b.block_tables + 100), scale=1.0)
    with pytest.raises(ValueError, match="contradict"):
        paged_attention(b.q, b.kv_layer, dataclasses.replace(b, seq_lens=b.seq_lens + 100), scale=1.0)
    row = torch.zeros(1, 1, 16)
    for slot in (-1, b.kv_layer.shape[1] * 32):
        with pytest.raises(ValueError, match="outside the cache"):
            write_kv(b.kv_layer, row, row, torch.tensor([slot]))


@pytest.mark.slow
def test_one_openmp_runtime_serves_torch_and_the_kernels(library: Library) -> None:
    """In a process of its own, as workers are: libraries of other tests bring runtimes of their own."""
    program = (
        "from serve_app.kernels.library import native; from serve_app.kernels.library.load import cpu_library;"
        "print(cpu_library().thread_limit, *native.openmp_runtimes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    limit, *runtimes = done.stdout.split()
    assert (limit, len(runtimes)) == ("0", 1), runtimes
