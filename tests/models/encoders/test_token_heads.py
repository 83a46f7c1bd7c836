"""BGE-M3's heads on a small random checkpoint, against the formulas spelt out one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from serve_app.api.multi_vector import Reading, scores
from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import EncodeError, Readout
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.tasks.text_embeddings.run import _reading
from serve_app.wire.encode import EncodedTokens
from tests.models.encoders.test_encoder import EMBEDDERS, texts, write

SPECIAL = {0, 1, 2, 3}
BOTH = ("sparse", "colbert")


def write_heads(path, width: int = 16, hidden: int = 48) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    found = {}
    for name, rows in (("sparse_linear", 1), ("colbert_linear", width)):
        found[name] = {"weight": torch.randn(rows, hidden) * 0.3, "bias": torch.randn(rows) * 0.1}
        save_file(found[name], path / f"{name}.safetensors")
    return found


@torch.no_grad()
def slow(model, heads, ids: np.ndarray) -> tuple[np.ndarray, dict[int, float], np.ndarray]:
    hidden = model(input_ids=torch.tensor(ids[None]).long()).last_hidden_state[0]
    sparse, colbert = (
        torch.nn.functional.linear(hidden, heads[n]["weight"], heads[n]["bias"])
        for n in ("sparse_linear", "colbert_linear")
    )
    lexical: dict[int, float] = {}
    for index, weight in zip(ids.tolist(), torch.relu(sparse[:, 0]).tolist(), strict=True):
        if index not in SPECIAL and weight > 0:
            lexical[index] = max(weight, lexical.get(index, 0))
    unit = torch.nn.functional.normalize
    return unit(hidden[0], dim=0).numpy(), lexical, unit(colbert[1:], dim=1).numpy()


def sent(rows: list[np.ndarray], width: int) -> EncodedTokens:
    """What a worker answers."""
    sizes = np.array([len(row) for row in rows], np.int32).tobytes()
    return EncodedTokens(sizes, width, memoryview(np.concatenate(rows).tobytes()))


# One family whose batches run flat and one that is padded.
@pytest.mark.parametrize("family", ["xlm_roberta", "deberta"])
def test_every_reading_equals_the_formulas(tmp_path, family):
    model_class, config, flat = EMBEDDERS[family]
    reference = write(tmp_path, model_class, config)
    heads = write_heads(tmp_path)
    model = load_encoder(tmp_path, "embeddings")
    assert model.flat is flat
    sequences = [ids for ids in texts(3, 30) if len(ids) > 1]
    batcher = EncodeBatcher(model, token_budget=256)
    try:
        readout = Readout("cls", heads=BOTH)
        plain = batcher.submit(sequences, Readout("cls"))
        rows = batcher.submit(sequences, readout).result(60)
        only = batcher.submit(sequences, Readout("cls", heads=("colbert",))).result(60)
        vectors = plain.result(60)
    finally:
        batcher.close()
    half = len(rows) // 2
    reading = _reading([sent(rows[:half], 48), sent(rows[half:], 48)], sequences, BOTH, SPECIAL)
    np.testing.assert_allclose(reading.dense, vectors, atol=1e-6)
    told = _reading([sent(only, 48)], sequences, ("colbert",), SPECIAL)
    assert told.lexical is None
    for i, ids in enumerate(sequences):
        dense, lexical, colbert = slow(reference, heads, ids)
        np.testing.assert_allclose(reading.dense[i], dense, atol=1e-5)
        assert reading.lexical[i].keys() == lexical.keys()
        for index, weight in lexical.items():
            assert reading.lexical[i][index] == pytest.approx(weight, abs=1e-5)
        np.testing.assert_allclose(reading.colbert[i], colbert, atol=1e-5)
        np.testing.assert_allclose(told.colbert[i], colbert, atol=1e-5)


def test_scores_are_the_papers():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(3, 8)).astype(np.float32)
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    vectors = [rng.normal(size=(n, 4)).astype(np.float32) for n in (2, 5, 3)]
    vectors = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors]
    lexical = [{5: 0.5, 6: 0.2}, {5: 0.1, 9: 3.0}, {6: 1.0, 5: 1.0}]
    reading = Reading(dense, lexical, vectors)
    by_dense = [float(dense[0] @ dense[i]) for i in (1, 2)]
    by_word = [0.05, 0.7]
    by_token = [sum(max(float(q @ t) for t in vectors[i]) for q in vectors[0]) / len(vectors[0]) for i in (1, 2)]
    assert scores(reading) == pytest.approx(by_dense)
    assert scores(reading, "sparse") == pytest.approx(by_word)
    assert scores(reading, "colbert") == pytest.approx(by_token)
    both = [(0.4 * d + 0.2 * s + 0.4 * c) for d, s, c in zip(by_dense, by_word, by_token, strict=True)]
    assert scores(reading, "all") == pytest.approx(both)
    assert scores(reading, "all", (0, 3, 0)) == pytest.approx(by_word)


def test_heads_that_are_not_there_or_not_safe(tmp_path):
    model_class, config, _ = EMBEDDERS["xlm_roberta"]
    write(tmp_path, model_class, config)
    (tmp_path / "colbert_linear.pt").write_bytes(b"a pickle")
    batcher = EncodeBatcher(load_encoder(tmp_path, "embeddings"))
    ids = [np.array([5, 6, 7], np.int32)]
    try:
        with pytest.raises(EncodeError, match="no such head"):
            batcher.submit(ids, Readout("cls", heads=("sparse",)))
        with pytest.raises(EncodeError, match=r"pickle.*colbert_linear\.safetensors"):
            batcher.submit(ids, Readout("cls", heads=("colbert",)))
    finally:
        batcher.close()


@pytest.mark.parametrize("tensors", [{}, {"weight": torch.zeros(2, 48)}, {"weight": torch.zeros(1, 5)}])
def test_heads_of_a_wrong_shape_are_refused(tmp_path, tensors):
    model_class, config, _ = EMBEDDERS["xlm_roberta"]
    write(tmp_path, model_class, config)
    save_file(tensors, tmp_path / "sparse_linear.safetensors")
    with pytest.raises(UnsupportedModel, match="sparse_linear"):
        load_encoder(tmp_path, "embeddings")
