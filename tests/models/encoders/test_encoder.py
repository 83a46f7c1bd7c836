"""Embedders and rerankers against transformers' own padded forward pass on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import EncodeBatch, Readout
from serve_app.models.encoders.encoder import MAX_PADDING, EncoderModel
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.loading.folder import UnsupportedModel
from tests.variants import some

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


@pytest.mark.parametrize("family", some(EMBEDDERS, "qwen3", "bert"))
@pytest.mark.parametrize("optimise", some([False, True], True))
def test_vectors_equal_transformers_for_every_pooling(tmp_path, family, optimise):
    model_class, config, flat = EMBEDDERS[family]
    reference = write(tmp_path, model_class, config)
    model = load_encoder(tmp_path, "embeddings", optimise=optimise)
    assert model.flat is flat, model.report
    sequences = texts(1, 40)
    for pooling in ("mean", "cls", "last"):
        found = encode(model, sequences, Readout(pooling=pooling))
        np.testing.assert_allclose(found, slow_vectors(reference, sequences, pooling), atol=1e-5)


@pytest.mark.parametrize("family", some(EMBEDDERS, *list(EMBEDDERS)[:2]))
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


@pytest.mark.slow
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
    [("pooling_mode_max_tokens", (), "max"), ("pooling_mode_mean_tokens", ("LSTM",), "LSTM")],
)
def test_what_we_cannot_compute_is_refused(tmp_path, mode, modules, word):
    write(tmp_path, *EMBEDDERS["bert"][:2])
    sentence_transformers_files(tmp_path, mode, *modules)
    with pytest.raises(UnsupportedModel, match=word):
        load_encoder(tmp_path, "embeddings")


def dense_module(folder: Path, inputs: int, outputs: int, activation: str, seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(inputs, outputs, bias=seed % 2 == 0)
    folder.mkdir(exist_ok=True)
    save_file({f"linear.{name}": t.detach() for name, t in linear.named_parameters()}, folder / "model.safetensors")
    name = f"torch.nn.modules.{activation}"
    config = {"in_features": inputs, "out_features": outputs, "activation_function": name}
    (folder / "config.json").write_text(json.dumps(config))
    return linear


def test_dense_modules_as_embeddinggemma_has_them(tmp_path):
    reference = write(tmp_path, *EMBEDDERS["bert"][:2])
    sentence_transformers_files(tmp_path, "pooling_mode_mean_tokens", "Dense", "Normalize")
    listing = json.loads((tmp_path / "modules.json").read_text())
    listing.insert(3, {**listing[2], "path": "3_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(listing))
    first = dense_module(tmp_path / "Dense", 48, 96, "linear.Identity", 1)
    second = dense_module(tmp_path / "3_Dense", 96, 24, "activation.Tanh", 2)
    model = load_encoder(tmp_path, "embeddings")
    assert model.dimensions == 24
    sequences = texts(6, 12)
    pooled = torch.from_numpy(slow_vectors(reference, sequences, "mean", normalise=False))
    wanted = torch.nn.functional.normalize(torch.tanh(second(first(pooled))), dim=-1)
    np.testing.assert_allclose(encode(model, sequences), wanted.detach().numpy(), atol=1e-5)
    (tmp_path / "Dense" / "config.json").write_text(
        json.dumps({"in_features": 48, "out_features": 95, "activation_function": "torch.nn.modules.linear.Identity"})
    )
    with pytest.raises(UnsupportedModel, match="other sizes"):
        load_encoder(tmp_path, "embeddings")


def test_a_causal_model_scores_by_the_logits_of_yes_and_no(tmp_path):
    config = Qwen3Config(**SIZES, **GROUPED, max_position_embeddings=128, tie_word_embeddings=False)
    reference = write(tmp_path, Qwen3ForCausalLM, config)
    with pytest.raises(UnsupportedModel, match='"yes" and "no"'):
        load_encoder(tmp_path, "reranker")
    described = {"model": {"vocab": {"yes": 17, "no": 30}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModel, match="no other prompt"):
        load_encoder(tmp_path, "reranker")
    described["added_tokens"] = [{"content": "<|im_start|>"}, {"content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    model = load_encoder(tmp_path, "reranker")
    sequences = texts(7, 15)
    with torch.no_grad():
        logits = [reference(torch.tensor(ids[None]).long()).logits[0, -1] for ids in sequences]
    wanted = [float(torch.softmax(row[[17, 30]], 0)[0]) for row in logits]
    np.testing.assert_allclose(encode(model, sequences), wanted, atol=1e-5)


@pytest.mark.slow
def test_an_embedder_with_longrope_does_not_depend_on_its_batch(tmp_path):
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + 3 * i for i in range(8)],
    }  # fmt: skip
    config = Qwen3Config(**SIZES, **GROUPED, max_position_embeddings=128, rope_parameters=rope)
    reference = write(tmp_path, Qwen3Model, config)
    model = load_encoder(tmp_path, "embeddings")
    sequences = texts(8, 30)
    wanted = slow_vectors(reference, sequences, "last")
    np.testing.assert_allclose(encode(model, sequences, Readout(pooling="last"), budget=1 << 12), wanted, atol=1e-5)
    model.flat = False
    model.module.set_attn_implementation("sdpa")
    np.testing.assert_allclose(encode(model, sequences, Readout(pooling="last"), budget=1 << 12), wanted, atol=1e-5)


def test_of_an_encoder_decoder_the_encoder_embeds(tmp_path):
    config = T5Config(vocab_size=200, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    reference = T5EncoderModel(config).eval()
    reference.save_pretrained(tmp_path)
    model = load_encoder(tmp_path, "embeddings")
    sequences = texts(9, 10)
    np.testing.assert_allclose(encode(model, sequences), slow_vectors(reference, sequences, "mean"), atol=1e-5)


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
