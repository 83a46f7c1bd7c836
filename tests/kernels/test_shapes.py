"""Shapes that contradict each other are refused before compiled code follows them, and nothing is written."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from serve_app.engine.kv_cache import KVShape
from serve_app.engine.step import build_batch
from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.decoder import Decoder, decoder_library
from serve_app.kernels.library.selftest import random_batch
from serve_app.kernels.shapes import ShapeMismatch, check_decoder
from serve_app.models.decoders import decoder_parts
from serve_app.models.loading.compare import probe
from tests import tiny

needs_bf16_dot = pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")
SLOTS = torch.tensor([32, 33, 34])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    ("keys", "values"),
    [((3, 4, 16), (3, 2, 16)), ((3, 2, 48), (3, 2, 16)), ((3, 2, 16), (3, 2, 8)), ((9, 2, 16), (9, 2, 16))],
    ids=["heads", "wide keys", "narrow values", "tokens"],
)
def test_rows_that_do_not_fit_the_cache_are_not_written(dtype, keys, values):
    cache = torch.zeros(2, 3, 2, 32, 16, dtype=dtype)
    with pytest.raises(ShapeMismatch, match="num_key_value_heads"):
        write_kv(cache, torch.ones(keys, dtype=dtype), torch.ones(values, dtype=dtype), SLOTS)
    assert not cache.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "torch"])
@pytest.mark.parametrize(("heads", "dim", "sinks"), [(3, 16, None), (4, 32, None), (4, 16, 3)])
def test_queries_that_do_not_fit_the_cache_are_refused(dtype, heads, dim, sinks):
    b = random_batch([2], [40], 4, 2, 16, dtype, 0)
    q = torch.zeros(2, heads, dim, dtype=dtype)
    with pytest.raises(ShapeMismatch, match="num_attention_heads"):
        paged_attention(q, b.kv_layer, b, scale=1.0, sinks=None if sinks is None else torch.zeros(sinks))


def test_a_batch_whose_arrays_differ_is_refused():
    b = random_batch([2, 1], [40, 3], 4, 2, 16, torch.float32, 0)
    for change in ({"query_start": b.query_start[:-1]}, {"block_tables": b.block_tables[:1]}):
        with pytest.raises(ShapeMismatch, match="build_batch"):
            paged_attention(b.q, b.kv_layer, dataclasses.replace(b, **change), scale=1.0)


def test_borders_that_leave_the_batch_are_refused(library):
    """In the midst as well, where the last border hides them."""
    b = random_batch([2, 1, 1], [60, 3, 3], 4, 2, 16, torch.float32, 0)
    for borders in ([0, 60, 3, 4], [-5, 2, 3, 4]):
        with pytest.raises(ValueError, match="contradict"):
            changed = dataclasses.replace(b, query_start=torch.tensor(borders, dtype=torch.int32))
            paged_attention(b.q, b.kv_layer, changed, scale=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", **sizes)
    return tiny.load(path, dtype="bfloat16")


def parts_of(model):
    return decoder_parts.read_model(model, lambda: probe(model, model.forward))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab": 512}, "embedding"),
        ({"hidden": 64}, "embedding"),
        ({"inner": 96}, "gate_up"),
        ({"inner": 256}, "gate_up"),
        ({"q_heads": 8}, "qkv"),
        ({"kv_heads": 4}, "qkv"),
        ({"head_dim": 64}, "qkv"),
    ],
)
def test_weights_that_do_not_fit_the_decoder_are_refused(model, change, named):
    parts = parts_of(model)
    shape = dataclasses.replace(parts.shape, **change)
    check_decoder(parts.shape, parts.embedding, parts.layers, parts.final_norm, parts.head)
    with pytest.raises(ShapeMismatch, match=f"{named} is .*its config.json does not describe its weights"):
        check_decoder(shape, parts.embedding, parts.layers, parts.final_norm, parts.head)


def test_norms_that_do_not_fit_the_decoder_are_refused(model):
    parts = parts_of(model)
    parts.layers[1].k_norm.weight = torch.ones(16)
    with pytest.raises(ShapeMismatch, match="layer 1's key norm"):
        check_decoder(parts.shape, parts.embedding, parts.layers, parts.final_norm, parts.head)


@needs_bf16_dot
def test_the_compiled_pass_refuses_another_models_cache(model):
    parts = parts_of(model)
    library = decoder_library()
    decoder = Decoder(
        library, parts.shape, parts.embedding, parts.layers, parts.final_norm, parts.head, parts.rotary
    )  # fmt: skip
    request = tiny.make_request("x", [1, 2, 3])
    request.blocks = [1]
    from serve_app.engine.step import Scheduled

    def run(shape):
        return decoder(build_batch([Scheduled(request, 0, 3, 1)], shape.allocate(2, "cpu")))

    assert run(model.kv_shape).shape == (1, 256)
    for layers, heads, dim, dtype in [(2, 2, 32, "bfloat16"), (3, 1, 32, "bfloat16"), (3, 2, 16, "bfloat16")]:
        with pytest.raises(ShapeMismatch, match="the cache is"):
            run(KVShape.uniform(layers, heads, dim, getattr(torch, dtype)))
    with pytest.raises(ShapeMismatch, match="kv_cache_dtype: auto"):
        run(KVShape.uniform(3, 2, 32, torch.float32))
    batch = build_batch([Scheduled(request, 0, 3, 1)], model.kv_shape.allocate(2, "cpu"))
    batch.slots = batch.slots[:2]
    with pytest.raises(ShapeMismatch, match="differ in length"):
        decoder(batch)
