"""The forms of bge-m3: what a body asks for, and how the answer has it."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.multi_vector import Reading, lexical_weights
from serve_app.api.types import EmbedRequest, Usage
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_embeddings.write import render_embed

MODEL = "@cf/baai/bge-m3"
READING = Reading(
    np.array([[1, 0], [0.6, 0.8]], np.float32),
    [{7: 0.5}, {7: 2.0, 9: 1.0}],
    [np.array([[1, 0]], np.float32), np.array([[0, 1], [0.6, 0.8]], np.float32)],
)


def parse(**body) -> EmbedRequest:
    return parse_embed(body, MODEL)


def answer(request: EmbedRequest) -> dict:
    heads = request.heads
    reading = Reading(
        READING.dense, READING.lexical if "sparse" in heads else None, READING.colbert if "colbert" in heads else None
    )
    return render_embed(request, reading, Usage(prompt_tokens=5))["result"]


def test_vectors_with_what_was_asked_for():
    assert answer(parse(text=["a", "b"])).keys() == {"shape", "data", "pooling", "usage"}
    request = parse(contexts=[{"text": "a"}, {"text": "b"}], return_sparse=True, return_colbert_vecs=True)
    found = answer(request)
    assert found["response"] == READING.dense.tolist() and found["shape"] == [2, 2]
    assert found["lexical_weights"] == [{"7": 0.5}, {"7": 2.0, "9": 1.0}]
    assert [len(vectors) for vectors in found["colbert_vecs"]] == [1, 2]
    only = answer(parse(text="a", return_dense=False, return_sparse=True))
    assert only.keys() == {"lexical_weights", "usage"}


@pytest.mark.parametrize(
    ("mode", "heads", "score"),
    [
        (None, (), 0.6),
        ("sparse", ("sparse",), 1.0),
        ("colbert", ("colbert",), 0.6),
        ("all", ("sparse", "colbert"), 0.68),
    ],
)
def test_scores_by_mode(mode, heads, score):
    request = parse(query="q", contexts=[{"text": "a"}], **({"score_mode": mode} if mode else {}))
    assert request.heads == heads
    [found] = answer(request)["response"]
    assert found == {"id": 0, "score": pytest.approx(score)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"return_sparse": "yes"},
        {"return_dense": False},
        {"score_mode": "best"},
        {"score_weights": [1, 2]},
        {"score_weights": [0, 0, 0]},
        {"score_weights": [1, "x", 1]},
        {"score_weights": [1, -1, 1]},
    ],
)
def test_what_is_refused(wrong):
    with pytest.raises(InvalidInput):
        parse(query="q", contexts=[{"text": "a"}], **wrong)


def test_lexical_weights_are_of_words():
    ids, weights = np.array([0, 5, 6, 5, 2], np.int32), np.array([9, 1, 0, 3, 9], np.float32)
    assert lexical_weights(ids, weights, {0, 2}) == {5: 3.0}
