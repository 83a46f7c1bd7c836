"""Latent attention keeps the latent, and computes what transformers computes with every head's keys and values."""

from __future__ import annotations

import pytest
import torch

from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.reference.attention import paged_attention_torch
from serve_app.models.latent import Latent
from tests import tiny


def generated(model, prompts, **options):
    engine = tiny.make_engine(model, **options)
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=6, ignore_eos=True))
    return tiny.run_all(engine)


@pytest.mark.parametrize("family", tiny.LATENT)
def test_tokens_equal_generate_with_the_latent_in_the_cache(one_thread, family, tmp_path):
    """Alone, in chunks beside others, and with a prefix that lies in the cache."""
    path = tiny.write_checkpoint(tmp_path, family)
    model = tiny.load(path, optimise=True)
    # DeepSeek-V2's formula: the latent and the rotated key, once for all heads.
    assert model.kv_shape.token_bytes == 3 * (48 + 16) * 4
    assert model.kv_shape.layout.name == "L3.H1.D64.S.B32.float32"
    reference = tiny.load_reference(path)
    prompts = [[(7 * i * i + 5 * n) % 250 + 3 for i in range(n)] for n in (3, 40, 75)]
    wanted = [tiny.reference_tokens(reference, prompt, 6, eos_token_id=None) for prompt in prompts]
    for options in ({"num_blocks": 20}, {"num_blocks": 20, "max_batch_tokens": 24}):
        found = generated(model, [*prompts, prompts[2]], **options)
        assert [found[str(i)] for i in range(4)] == [*wanted, wanted[2]]


def test_the_cache_moves_latents_as_it_moves_keys_and_values(one_thread, tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "deepseek_v3"))
    kv, other = (model.kv_shape.allocate(4, "cpu") for _ in range(2))
    kv.planes[0].normal_()
    payload = kv.copy_out([1, 3])
    assert payload.numel() == 2 * model.kv_shape.block_bytes == 2 * model.kv_shape.layout.block_bytes
    other.copy_in([2, 1], payload)
    assert torch.equal(other.layer(2)[:, 2], kv.layer(2)[:, 1])


def test_with_places_for_adapters_it_keeps_heads(one_thread, tmp_path):
    """Adapters of what makes keys and values of latents have their place there."""
    from serve_app.models.load import load_causal_lm

    path = tiny.write_checkpoint(tmp_path, "deepseek_v3")
    model = load_causal_lm(path, dtype="float32", adapters=2)
    assert model.kv_shape.token_bytes == 3 * 2 * 4 * 40 * 4


def test_absorbed_products_equal_expanded_ones():
    torch.manual_seed(0)
    latent = Latent(torch.randn(4, 24, 48), torch.randn(4, 40, 48))
    query, cached, rotated = torch.randn(1, 4, 5, 40), torch.randn(5, 48), torch.randn(5, 16)
    keys = torch.cat([torch.einsum("hnr,tr->htn", latent.keys, cached), rotated.expand(4, 5, 16)], -1)
    scores = latent.absorb(query)[0] @ torch.cat([cached, rotated], -1).t()
    torch.testing.assert_close(scores, query[0] @ keys.transpose(1, 2), rtol=1e-4, atol=1e-4)
    weights = scores.softmax(-1)
    expanded = weights @ torch.einsum("hvr,tr->htv", latent.values, cached)
    sums = (weights @ cached).transpose(0, 1)
    torch.testing.assert_close(latent.expand(sums), expanded.transpose(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_keys_that_are_their_own_values(dtype):
    """As wide as DeepSeek's latents, in C++ and in torch."""
    from serve_app.engine.kv_cache import KVShape, LayerShape
    from serve_app.engine.request import Request
    from serve_app.engine.step import Scheduled, build_batch
    from serve_app.sampling_params import SamplingParams

    torch.manual_seed(0)
    kv = KVShape((LayerShape(1, 576, True),), dtype).allocate(4, "cpu")
    requests = [Request(str(n), [5] * n, n, SamplingParams(), b"", blocks=b) for n, b in ((40, [1, 3]), (7, [2]))]
    batch = build_batch([Scheduled(r, 0, len(r.tokens), 1) for r in requests], kv)
    keys, queries = torch.randn(47, 1, 576).to(dtype), torch.randn(47, 8, 576).to(dtype)
    write_kv(kv.layer(0), keys, keys, batch.slots)
    found = paged_attention(queries, kv.layer(0), batch, scale=0.05)
    wanted = paged_attention_torch(queries.float(), kv.layer(0).float(), batch, scale=0.05)
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-4)
