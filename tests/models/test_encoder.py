"""Embedders and rerankers against transformers' own padded forward pass on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import EncodeBatch, Readout
from serve_app.models.encoder import MAX_PADDING, EncoderModel, load_encoder
from serve_app.models.load import UnsupportedModel

SIZES = dict(
    vocab_size=200,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    pad_token_id=0,
)
PAD_1 = {"pad_token_id": 1}
GROUPED = dict(num_key_value_heads=2, head_dim=16)
WINDOWED = dict(local_attention=8, global_attn_every_n_layers=3, max_position_embeddings=128)
EMBEDDERS = {
    "bert": (BertModel, BertConfig(**SIZES, max_position_embeddings=128), True),
    "xlm_roberta": (
        XLMRobertaModel,
        XLMRobertaConfig(**SIZES | PAD_1, max_position_embeddings=130),
        True,
    ),
    "qwen3": (
        Qwen3Model,
        Qwen3Config(**SIZES, **GROUPED, max_position_embeddings=128),
        True,
    ),
    # A local window, and relative positions outside the attention interface: these must be padded.
    "modernbert": (
        ModernBertModel,
        ModernBertConfig(**SIZES, **WINDOWED, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
        False,
    ),
    "deberta": (
        DebertaV2Model,
        DebertaV2Config(**SIZES, max_position_embeddings=128, relative_attention=True),
        False,
    ),
}


def write(path: Path, model_class: type, config, seed: int = 0):
    """Saves a random float32 checkpoint with weights spread widely enough for outputs to differ."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embeddings" not in name:
                parameter.normal_(0, 0.15)
    model.save_pretrained(path)
    return model


def texts(seed: int, count: int, longest: int = 90) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 200, n).astype(np.int32) for n in rng.integers(1, longest + 1, count)]


@torch.no_grad()
def slow_vectors(model, sequences: list[np.ndarray], pooling: str, normalise: bool = True) -> np.ndarray:
    """One sequence at a time through transformers, then pooling spelt out."""
    rows = []
    for ids in sequences:
        hidden = model(input_ids=torch.tensor(ids[None]).long()).last_hidden_state[0]
        rows.append({"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling])
    out = torch.stack(rows)
    return (torch.nn.functional.normalize(out, dim=-1) if normalise else out).numpy()


def encode(
    model: EncoderModel,
    sequences: list[np.ndarray],
    readout: Readout | None = None,
    budget: int = 256,
    **more,
):
    batcher = EncodeBatcher(model, token_budget=budget)
    try:
        return batcher.submit(sequences, readout, **more).result(60)
    finally:
        batcher.close()


@pytest.mark.parametrize("family", EMBEDDERS)
@pytest.mark.parametrize("optimise", [False, True], ids=["plain", "packed"])
def test_vectors_equal_transformers_for_every_pooling(tmp_path, family, optimise):
    model_class, config, flat = EMBEDDERS[family]
    reference = write(tmp_path, model_class, config)
    model = load_encoder(tmp_path, "embeddings", optimise=optimise)
    assert model.flat is flat, model.report
    sequences = texts(1, 40)
    for pooling in ("mean", "cls", "last"):
        found = encode(model, sequences, Readout(pooling=pooling))
        np.testing.assert_allclose(found, slow_vectors(reference, sequences, pooling), atol=1e-5)


@pytest.mark.parametrize("family", EMBEDDERS)
def test_a_vector_does_not_depend_on_its_neighbours(tmp_path, family):
    write(tmp_path, *EMBEDDERS[family][:2])
    model = load_encoder(tmp_path, "embeddings")
    sequences = texts(2, 60)
    alone = np.concatenate([encode(model, [s]) for s in sequences[:10]])
    for budget in (100, 1 << 14):
        together = encode(model, sequences, budget=budget)[:10]
        np.testing.assert_allclose(together, alone, atol=1e-5)


def test_one_batch_may_mix_poolings(tmp_path):
    reference = write(tmp_path, *EMBEDDERS["bert"][:2])
    model = load_encoder(tmp_path, "embeddings")
    sequences = sorted(texts(3, 9), key=len)
    kinds = ["mean", "cls", "last"] * 3
    ids = np.concatenate(sequences)
    rows = model.forward(EncodeBatch(ids, np.zeros_like(ids), np.array([len(s) for s in sequences]), kinds))
    for row, ids, kind in zip(rows, sequences, kinds, strict=True):
        np.testing.assert_allclose(row, slow_vectors(reference, [ids], kind, normalise=False)[0], atol=2e-5)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (BertForSequenceClassification, BertConfig(**SIZES, num_labels=1, max_position_embeddings=128)),
        (
            XLMRobertaForSequenceClassification,
            XLMRobertaConfig(**SIZES | PAD_1, num_labels=1, max_position_embeddings=130, type_vocab_size=1),
        ),
    ],
)
def test_reranker_scores_equal_transformers_logits(tmp_path, model_class, config):
    reference = write(tmp_path, model_class, config)
    model = load_encoder(tmp_path, "reranker")
    assert model.flat, model.report
    pairs = texts(4, 30)
    kinds = [(np.arange(len(p)) > len(p) // 2).astype(np.int32) % config.type_vocab_size for p in pairs]
    with torch.no_grad():
        logits = np.array(
            [
                reference(
                    input_ids=torch.tensor(p[None]).long(), token_type_ids=torch.tensor(k[None]).long()
                ).logits.item()
                for p, k in zip(pairs, kinds, strict=True)
            ]
        )
    assert np.ptp(logits) > 0.01, "the reference must tell the pairs apart"
    raw = encode(model, pairs, Readout(pooling="score", sigmoid=False), type_ids=kinds)
    np.testing.assert_allclose(raw, logits, atol=1e-5)
    np.testing.assert_allclose(encode(model, pairs, type_ids=kinds), 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_padding_is_bounded_where_a_model_must_pad(tmp_path):
    write(tmp_path, *EMBEDDERS["modernbert"][:2])
    model = load_encoder(tmp_path, "embeddings")
    lengths = np.sort(np.random.default_rng(0).integers(1, 100, 500))
    assert lengths.sum() < model.padded_tokens(lengths) <= lengths.sum() / (1 - MAX_PADDING)


def test_limits_come_from_the_position_table(tmp_path):
    for family in ("bert", "xlm_roberta"):
        write(tmp_path / family, *EMBEDDERS[family][:2])
        model = load_encoder(tmp_path / family, "embeddings")
        assert model.max_length == 128
        longest = np.full(128, 7, np.int32)
        assert np.isfinite(encode(model, [longest])).all()
    assert load_encoder(tmp_path / "bert", "embeddings", max_length=20).max_length == 20


def sentence_transformers_files(path: Path, mode: str, *modules: str) -> None:
    names = ["Transformer", "Pooling", *modules]
    folders = ["", "1_Pooling", *modules]
    listing = [
        {"idx": i, "path": f, "type": f"sentence_transformers.models.{n}"}
        for i, (n, f) in enumerate(zip(names, folders, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(listing))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, mode: True}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))


def test_sentence_transformers_files_set_the_defaults_and_the_caller_overrides(tmp_path):
    write(tmp_path, *EMBEDDERS["bert"][:2])
    assert load_encoder(tmp_path, "embeddings").readout == Readout(pooling="mean", normalise=True)
    sentence_transformers_files(tmp_path, "pooling_mode_cls_token")
    model = load_encoder(tmp_path, "embeddings")
    assert model.readout == Readout(pooling="cls", normalise=False)
    sentence_transformers_files(tmp_path, "pooling_mode_lasttoken", "Normalize")
    assert load_encoder(tmp_path, "embeddings").readout == Readout(pooling="last", normalise=True)
    assert load_encoder(tmp_path, "embeddings", pooling="mean").readout.pooling == "mean"


@pytest.mark.parametrize(
    ("mode", "modules", "word"),
    [("pooling_mode_max_tokens", (), "max"), ("pooling_mode_mean_tokens", ("Dense",), "Dense")],
)
def test_what_we_cannot_compute_is_refused(tmp_path, mode, modules, word):
    write(tmp_path, *EMBEDDERS["bert"][:2])
    sentence_transformers_files(tmp_path, mode, *modules)
    with pytest.raises(UnsupportedModel, match=word):
        load_encoder(tmp_path, "embeddings")


def test_pickled_weights_are_refused_with_the_remedy(tmp_path):
    model = write(tmp_path, *EMBEDDERS["bert"][:2])
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*safetensors"):
        load_encoder(tmp_path, "embeddings")


def test_a_checkpoint_without_a_score_head_is_no_reranker(tmp_path):
    write(tmp_path / "embedder", BertModel, BertConfig(**SIZES, num_labels=1))
    with pytest.raises(UnsupportedModel, match="classifier"):
        load_encoder(tmp_path / "embedder", "reranker")
    write(tmp_path / "classes", BertForSequenceClassification, BertConfig(**SIZES, num_labels=3))
    with pytest.raises(UnsupportedModel, match="3 labels"):
        load_encoder(tmp_path / "classes", "reranker")


def test_bfloat16_stays_close(tmp_path):
    reference = write(tmp_path, *EMBEDDERS["bert"][:2])
    model = load_encoder(tmp_path, "embeddings", dtype="bfloat16")
    sequences = texts(5, 20)
    found = encode(model, sequences)
    assert ((found * slow_vectors(reference, sequences, "mean")).sum(1) > 0.999).all()
