"""Adapters in the places of a model, on every forward pass: alone, beside others, with quantised bases."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import read_adapter
from serve_app.engine.request import Request
from serve_app.engine.step import Scheduled, build_batch
from serve_app.kernels.linear.panels import panel_library
from serve_app.kernels.reference.operators import TORCH
from serve_app.models.decoders import decoder_parts
from serve_app.models.decoders.device import DeviceForward
from serve_app.models.loading.compare import difference, probe
from serve_app.models.loading.miniature import randomise
from serve_app.sampling_params import SamplingParams
from tests import tiny
from tests.adapters.made import config, weights
from tests.variants import some

CPP = panel_library() is not None
cpp = pytest.mark.skipif(not CPP, reason="the C++ decoder needs bfloat16 dot products")
PLACES = 3
SMALL = {"num_hidden_layers": 2}


def shapes_of(model, *only: str) -> dict[str, tuple[int, int]]:
    """[n, k] of the linears whose last name is in ``only``, or of all but the head."""
    found = {}
    for place in model.adapters.linears:
        for name, width in zip(place.names, place.widths, strict=True):
            last = name.rpartition(".")[2]
            if last in only if only else last != "lm_head":
                found[name] = (width, place.columns)
    return found


def adapter(model, *only: str, rank: int = 4, dtype=torch.float32, seed: int = 0):
    made = weights(shapes_of(model, *only), rank, dtype=dtype, seed=seed)
    return read_adapter(config(r=rank), made)


def adapters_for(model):
    """Three that have little in common."""
    return [
        adapter(model, rank=6, seed=1),
        adapter(model, "q_proj", "v_proj", "up_proj", rank=16, dtype=torch.bfloat16, seed=2),
        adapter(model, "k_proj", "down_proj", "lm_head", rank=3, dtype=torch.float16, seed=3),
    ]


def fill(model):
    for place, weights_ in enumerate(adapters_for(model), start=1):
        model.adapters.put(place, model.adapters.prepare(weights_))


def with_places(forward, *places: int):
    """The forward pass with row i's adapter in ``places[i % n]``; one with all of a prompt's rows where n is 1."""

    def called(batch):
        batch.adapters = torch.tensor([places[i % len(places)] for i in range(len(batch.input_ids))])
        return forward(batch)

    return called


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SMALL)


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def decoder(request, path):
    """The C++ decoder with three adapters, and the same model without places."""
    quantization = request.param
    model, plain = (
        tiny.load(path, dtype="bfloat16", optimise=True, quantization=quantization, adapters=places)
        for places in (PLACES, 0)
    )
    assert "C++" in model.report["fused_decoder"]
    fill(model)
    return model, plain, quantization


@cpp
def test_the_decoder_gives_what_the_layers_in_torch_give(decoder, path):
    model, plain, quantization = decoder
    reference = tiny.load(path, dtype="bfloat16", adapters=PLACES, quantization=quantization)
    fill(reference)
    base = probe(plain, plain.forward)
    for place in (1, 2, 3):
        wanted = probe(reference, with_places(reference.forward, place))
        found = probe(model, with_places(model.forward, place))
        assert difference(found, wanted) < (0.05 if quantization != "none" else 0.02)
        assert difference(wanted, base) > 0.2


@cpp
def test_rows_without_an_adapter_get_the_base_to_the_last_bit(decoder):
    model, plain, _ = decoder
    base = probe(plain, plain.forward)
    assert torch.equal(probe(model, model.forward), base)
    assert torch.equal(probe(model, with_places(model.forward, 0)), base)


def step(model, forward, requests, places):
    """Logits of the last token of each request, all in one batch over a cache that has nothing yet."""
    kv = model.kv_shape.allocate(1 + 2 * len(requests), "cpu")
    made = [
        Request(str(i), prompt, len(prompt), SamplingParams(), root=b"", blocks=[1 + 2 * i, 2 + 2 * i], adapter=place)
        for i, (prompt, place) in enumerate(zip(requests, places, strict=True))
    ]
    return forward(build_batch([Scheduled(r, 0, len(r.tokens), 1) for r in made], kv))


@cpp
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it(decoder):
    model, plain, _ = decoder
    prompts = [[(7 * i + 11 * r) % 250 + 3 for i in range(3 + 9 * r)] for r in range(7)]
    places = [0, 2, 1, 3, 2, 0, 1]
    together = step(model, model.forward, prompts, places)
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        alone = step(model, model.forward, [prompt], [place])
        assert torch.equal(together[row], alone[0]), row
    assert torch.equal(together[0], step(plain, plain.forward, prompts[:1], [0])[0])


@cpp
def test_threads_share_the_work(decoder):
    """Attention adds up in another order with other threads, and nothing else does."""
    model, _, quantization = decoder
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(probe(model, with_places(model.forward, 1, 2, 0, 3)))
    finally:
        torch.set_num_threads(before)
    assert max(difference(logits, found[0]) for logits in found) < (0.005 if quantization == "none" else 0.05)


@cpp
def test_a_row_whose_place_is_not_there_is_refused(decoder):
    model, _, _ = decoder
    for place in (-1, PLACES + 1, 1 << 40):
        with pytest.raises(ValueError, match="place"):
            probe(model, with_places(model.forward, place))


@pytest.mark.parametrize(
    ("optimise", "dtype"),
    some([*product([False, True], ["float32", "bfloat16"])], (False, "float32"), (True, "bfloat16"), names=2),
)
def test_an_adapter_is_put_exchanged_and_cleared(path, optimise, dtype):
    model = tiny.load(path, dtype=dtype, optimise=optimise, adapters=2)
    base = probe(model, model.forward)
    one, two = (model.adapters.prepare(adapter(model, seed=seed)) for seed in (1, 2))
    assert one.bytes > 0
    model.adapters.put(2, one)
    first = probe(model, with_places(model.forward, 2))
    model.adapters.put(2, two)
    second = probe(model, with_places(model.forward, 2))
    assert difference(first, base) > 0.2 and difference(second, first) > 0.2
    model.adapters.put(1, one)
    assert torch.equal(probe(model, with_places(model.forward, 1)), first)
    model.adapters.clear(2)
    assert difference(probe(model, with_places(model.forward, 2)), base) < 0.01
    for place in (0, 3):
        with pytest.raises(ValueError, match="load it with more"):
            model.adapters.put(place, one)


def test_an_adapter_of_another_model_is_refused_by_name(path):
    model = tiny.load(path, optimise=True, adapters=1)
    right = shapes_of(model)
    for wrong, text in (
        ({"model.layers.9.mlp.up_proj": (128, 64)}, r"layers\.9\.mlp\.up_proj is no linear"),
        ({"model.embed_tokens": (256, 64)}, "embed_tokens is no linear"),
        ({next(iter(right)): (right[next(iter(right))][0], 32)}, "another model"),
        ({next(iter(right)): (32, right[next(iter(right))][1])}, "another model"),
    ):
        with pytest.raises(AdapterRefused, match=text):
            model.adapters.prepare(read_adapter(config(), weights(wrong)))


def test_the_layers_for_gpus_have_places(path):
    model = tiny.load(path, adapters=PLACES)
    fill(model)
    wanted = [probe(model, with_places(model.forward, place)) for place in (1, 2, 3)]
    other = tiny.load(path, adapters=PLACES)
    bank = other.adapters
    bank.reset()
    plain = tiny.load(path)
    parts = decoder_parts.read_model(plain, lambda: probe(plain, plain.forward))
    forward = DeviceForward(parts, TORCH, 256, plug=bank.plug)
    fill(other)
    for place, truth in enumerate(wanted, start=1):
        torch.testing.assert_close(probe(other, with_places(forward, place)), truth, atol=2e-3, rtol=2e-3)


def test_layers_in_float8_have_places(path):
    model, plain = (
        tiny.load(path, dtype="float32", optimise=True, quantization="fp8", adapters=places) for places in (PLACES, 0)
    )
    assert "float8" in model.report["fused_decoder"]
    fill(model)
    reference = tiny.load(path, adapters=PLACES)
    fill(reference)
    base = probe(plain, plain.forward)
    for place in (1, 2, 3):
        wanted = probe(reference, with_places(reference.forward, place))
        found = probe(model, with_places(model.forward, place))
        assert difference(found, wanted) < 0.15 and difference(found, base) > 0.2
    assert torch.equal(probe(model, with_places(model.forward, 0)), base)


def test_a_head_of_several_linears_has_places(tmp_path):
    """BERT's gets the rows that are sampled, and not its last linear alone."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = BertLMHeadModel(BertConfig(**sizes, intermediate_size=128, max_position_embeddings=256, is_decoder=True))
    randomise(made)
    made.save_pretrained(tmp_path / "bert")
    model, truth = tiny.load(tmp_path / "bert", adapters=1), tiny.load_reference(tmp_path / "bert")
    given = adapter(model, "dense", "query", "decoder", rank=4)
    assert "cls.predictions.transform.dense" in given.deltas
    model.adapters.put(1, model.adapters.prepare(given))
    with torch.no_grad():
        for name, delta in given.deltas.items():
            truth.get_submodule(name).weight.add_(delta.scale * delta.b @ delta.a)
    request = tiny.make_request("a", list(range(3, 40)), max_tokens=6, ignore_eos=True)
    request.adapter = 1
    engine = tiny.make_engine(model)
    engine.add(request)
    assert tiny.run_all(engine)["a"] == tiny.reference_tokens(truth, list(range(3, 40)), 6)
