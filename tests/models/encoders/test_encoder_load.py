"""What the loader of embedders finds out about a model, and what it makes of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BigBirdConfig,
    BigBirdForSequenceClassification,
    BigBirdModel,
    Llama4TextConfig,
    Llama4TextModel,
    NeoMMEConfig,
    NeoMMEModel,
    Qwen2MoeConfig,
    Qwen2MoeModel,
    ReformerConfig,
    ReformerModel,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from serve_app.engine.encoder.types import EncodeBatch
from serve_app.kernels.linear import packed
from serve_app.models.encoders import encoder_load
from serve_app.models.encoders.encoder import EncoderModel
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.loading import kept
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.miniature import build

SIZES = dict(vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
BIG_BIRD = BigBirdConfig(
    **SIZES, max_position_embeddings=256, block_size=8, num_random_blocks=1
)  # full up to 56 tokens


pytestmark = pytest.mark.usefixtures("one_thread")


def means(model: EncoderModel, texts: list[np.ndarray]) -> np.ndarray:
    """One batch of ``texts``, ascending by length."""
    ids = np.concatenate(texts)
    lengths = np.array([len(text) for text in texts])
    found = model.forward(EncodeBatch(ids, np.zeros_like(ids), lengths, ["mean"] * len(texts)))
    return np.stack(list(found))


@torch.inference_mode()
def alone(module: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    return module(input_ids=torch.from_numpy(ids[None]).long()).last_hidden_state[0].mean(0).numpy()


def random_texts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 200, n).astype(np.int32) for n in lengths]


def test_the_length_of_a_text_chooses_its_attention_whatever_ran_before(tmp_path):
    fresh = build(BigBirdModel, BIG_BIRD)
    fresh.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, "embeddings", optimise=False)
    texts = random_texts(3, 50, 57, 120, 120)
    for order in (texts, texts[2:], texts[:2]):
        wanted = [alone(copy.deepcopy(fresh), ids) for ids in order]
        np.testing.assert_allclose(means(model, order), np.stack(wanted), atol=1e-5)


def test_a_reranker_chooses_by_length_as_well(tmp_path):
    config = BigBirdConfig(**BIG_BIRD.to_dict() | {"num_labels": 1})
    fresh = build(BigBirdForSequenceClassification, config)
    fresh.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, "reranker", optimise=False)
    for text in random_texts(3, 60):
        with torch.inference_mode():
            wanted = copy.deepcopy(fresh)(input_ids=torch.from_numpy(text[None]).long()).logits[0, 0]
        batch = EncodeBatch(text, np.zeros_like(text), np.array([len(text)]), ["score"])
        assert float(model.forward(batch)[0][0]) == pytest.approx(float(wanted), abs=1e-5)


REFORMER = dict(
    vocab_size=200, hidden_size=32, num_attention_heads=2, attention_head_size=16, feed_forward_size=32,
    axial_pos_embds=False, max_position_embeddings=256, is_decoder=False, attn_layers=["lsh"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"num_buckets": 4}, "draws random numbers"), ({"hash_seed": 3}, "changes num_buckets in its configuration")],
)
def test_a_model_that_gives_another_vector_each_time_is_refused(tmp_path, fields, reason):
    build(ReformerModel, ReformerConfig(**REFORMER, **fields)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_encoder(tmp_path, "embeddings")


def test_a_model_that_draws_the_same_numbers_each_time_is_served(tmp_path):
    own = build(ReformerModel, ReformerConfig(**REFORMER, num_buckets=4, hash_seed=3))
    own.save_pretrained(tmp_path)
    [text] = random_texts(200)
    model = load_encoder(tmp_path, "embeddings", optimise=False)
    np.testing.assert_allclose(means(model, [text])[0], alone(own, text), atol=1e-5)


class Doubled:
    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.weights(x)


@pytest.mark.parametrize("config, model_class", [(BertConfig(**SIZES), BertModel), (BIG_BIRD, BigBirdModel)])
def test_what_was_compared_once_is_known_at_the_next_start(tmp_path, monkeypatch, config, model_class):
    monkeypatch.setattr(kept, "cache_root", lambda: tmp_path / "home" / "kernels")
    path, texts = tmp_path / "model", [np.arange(3, 9, dtype=np.int32), np.arange(20, 90, dtype=np.int32)]
    build(model_class, config, 0).save_pretrained(path)
    first = load_encoder(path, "embeddings", remember=True)
    with monkeypatch.context() as again:
        for name in ("_check_alone", "_try_flat", "_differs"):
            again.setattr(encoder_load, name, None)
        known = load_encoder(path, "embeddings", remember=True)
        with pytest.raises(TypeError):  # whoever does not ask for it
            load_encoder(path, "embeddings")
        build(model_class, config, 1).save_pretrained(path)
        with pytest.raises(TypeError):  # other weights under the same name
            load_encoder(path, "embeddings", remember=True)
    assert (known.flat, known.padding) == (first.flat, first.padding)
    assert known.report.get("padded_because") == first.report.get("padded_because")
    np.testing.assert_array_equal(means(known, texts), means(first, texts))


def test_linears_stay_as_they_are_where_packed_ones_change_the_model(tmp_path, monkeypatch):
    own = build(BertModel, BertConfig(**SIZES, max_position_embeddings=128))
    own.save_pretrained(tmp_path)
    original = packed.pack_linears

    def changes(module: torch.nn.Module, **options: object) -> packed.PackReport:
        report = original(module, **options)
        for child in module.modules():
            if isinstance(child, packed.PackedLinear):
                child.weights = Doubled(child.weights)
        return report

    monkeypatch.setattr(packed, "pack_linears", changes)
    model = load_encoder(tmp_path, "embeddings")
    assert model.report["linears"].startswith("left as they are: with packed ones results differ by")
    [text] = random_texts(40)
    wanted = alone(own, text)
    np.testing.assert_allclose(means(model, [text])[0], wanted, atol=1e-5)


LONG = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
# Borders that no text passes which is tried at load, and of which attention is told nothing.
IN_MASKS = {
    "a window": (Qwen2MoeModel, Qwen2MoeConfig, {
        "use_sliding_window": True, "sliding_window": 110, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    "chunks": (Llama4TextModel, Llama4TextConfig, {
        "attention_chunk_size": 110, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 16,
        "no_rope_layers": [1, 0], "floor_scale": 4096}),
    "a scale by position": (Llama4TextModel, Llama4TextConfig, {
        "attention_chunk_size": 4096, "num_local_experts": 2, "head_dim": 16,
        "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "floor_scale": 110}),
    "a window for each layer": (NeoMMEModel, NeoMMEConfig, {
        "sliding_window": 110, "per_layer_config": {1: {"sliding_window": None}}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", IN_MASKS)
def test_borders_that_stand_in_masks_are_kept(tmp_path, kind):
    model_class, config_class, fields = IN_MASKS[kind]
    own = build(model_class, config_class(**LONG | fields))
    own.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, "embeddings", optimise=False)
    assert not model.flat
    texts = random_texts(40, 100, 180, 240)
    np.testing.assert_allclose(means(model, texts), np.stack([alone(own, ids) for ids in texts]), atol=1e-4)


def test_a_reranker_of_texts_of_any_length(tmp_path):
    """XLNet has no limit of positions, and reads its score off the last place of a batch."""
    config = XLNetConfig(vocab_size=200, d_model=32, n_layer=2, n_head=2, d_inner=48, num_labels=1, pad_token_id=0)
    own = build(XLNetForSequenceClassification, config)
    own.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, "reranker", optimise=False)
    texts = random_texts(5, 40, 41)
    ids = np.concatenate(texts)
    found = model.forward(EncodeBatch(ids, np.zeros_like(ids), np.array([len(t) for t in texts]), ["score"] * 3))
    with torch.inference_mode():
        wanted = [float(own(input_ids=torch.from_numpy(text[None]).long()).logits) for text in texts]
    np.testing.assert_allclose(np.stack(list(found))[:, 0], wanted, atol=1e-5)
