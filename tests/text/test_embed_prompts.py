"""Prompts before texts are those that sentence-transformers would write."""

from __future__ import annotations

import json

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_embeddings.run import prompted
from serve_app.text.embed_prompts import prompt_for

QWEN = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


def write(folder, **config):
    folder.mkdir()
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    return folder


def test_roles_and_the_default(tmp_path):
    qwen = write(tmp_path / "qwen", prompts={"query": QWEN, "document": ""}, default_prompt_name=None)
    assert (prompt_for(qwen, "query"), prompt_for(qwen, "document"), prompt_for(qwen, None)) == (QWEN, "", "")
    assert (
        prompt_for(qwen, "query", "Find code") == prompt_for(qwen, None, "Find code") == "Instruct: Find code\nQuery:"
    )
    assert prompt_for(qwen, "document", "Find code") == ""
    e5 = write(tmp_path / "e5", prompts={"query": "query: ", "passage": "passage: "}, default_prompt_name="passage")
    assert [prompt_for(e5, role) for role in ("query", "document", None)] == ["query: ", "passage: ", "passage: "]
    with pytest.raises(InvalidInput, match="no instruction"):
        prompt_for(e5, "query", "Find code")
    assert prompt_for(tmp_path, "query") == ""


def test_bodies_name_the_role(tmp_path):
    folder = write(tmp_path / "e5", prompts={"query": "query: ", "passage": "passage: "})
    cases = [
        ({"text": "a"}, ["a"]),
        ({"queries": ["a", "b"]}, ["query: a", "query: b"]),
        ({"documents": "a"}, ["passage: a"]),
        ({"contexts": [{"text": "a"}]}, ["passage: a"]),
        ({"query": "q", "contexts": [{"text": "a"}]}, ["query: q", "passage: a"]),
    ]
    for body, wanted in cases:
        assert prompted(folder, parse_embed(body, "m")) == wanted


@pytest.mark.parametrize("body", [{"text": "a", "queries": "b"}, {"queries": "a", "documents": "b"}, {"queries": [""]}])
def test_one_role_at_a_time(body):
    with pytest.raises(InvalidInput):
        parse_embed(body, "m")
