"""The embedder that comes with the project, with its real weights, through the catalogue."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import BUILT_IN, load_record
from serve_app.catalog.weights import resolve
from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.models.encoders.encoder_load import load_encoder


@pytest.fixture(scope="module")
def folder() -> Path:
    record = load_record(BUILT_IN / "all-minilm-l6-v2.yaml")
    home = Path(os.environ.get("SERVE_APP_HOME", "~/.serve_app")).expanduser()
    try:
        return resolve(record.weights, home)
    except CatalogError as error:
        pytest.skip(f"the weights can't be had here: {error}")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="module")
def embed(folder, tokenizer):
    batcher = EncodeBatcher(load_encoder(folder, "embeddings"))

    def embed(texts: list[str]) -> np.ndarray:
        ids = [np.array(tokenizer.encode(t).ids, np.int32) for t in texts]
        return batcher.submit(ids).result(60)

    yield embed
    batcher.close()


def test_similarities_are_those_its_authors_publish(embed):
    """The example in sentence-transformers' quickstart, with the values printed there."""
    vectors = embed(["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    np.testing.assert_allclose(
        vectors @ vectors.T, [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]], atol=2e-4
    )


@pytest.mark.slow
def test_vectors_equal_a_padded_transformers_batch_with_masked_mean(embed, folder, tokenizer):
    from transformers import AutoModel

    texts = [f"Line {i}: " + "the quick brown fox jumps over the lazy dog. " * (i % 9) for i in range(24)]
    encodings = [tokenizer.encode(t).ids for t in texts]
    ids = torch.zeros(len(texts), max(map(len, encodings)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding)] = torch.tensor(encoding)
        mask[row, : len(encoding)] = 1
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = torch.nn.functional.normalize(mean, dim=-1).numpy()
    np.testing.assert_allclose(embed(texts), expected, atol=1e-5)
