"""Text that spells a control token stays text: in choices, expressions, schemas and the names of properties."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from serve_app.engine.request import FINISH_STOP
from serve_app.grammar.rules import choice_rule, grammar, json_rule, regex_rule
from serve_app.text.tokenizer import unspellable
from tests.grammar.test_generate import add, run

NAMES = ("<|end|>", "<|user|>", "<tool_call>", "</tool_call>", "a<|begin|>b")


def schema(name: str) -> dict:
    return {"type": "object", "properties": {name: {"const": name}}, "required": [name], "additionalProperties": False}


def test_a_model_writes_the_text_of_control_tokens(engine, tokenizer):
    made, expected = engine(), {}
    for index, name in enumerate(NAMES):
        for kind, body, text in (
            ("1", choice_rule([name]), name),
            ("2", regex_rule(f"x{re.escape(name)}!"), f"x{name}!"),
            ("3", json_rule(schema(name)), json.dumps({name: name})),
        ):
            add(made, f"{index}{kind}", grammar("answer", {"answer": body}))
            expected[f"{index}{kind}"] = text
    tokens, ends, errors = run(made)
    assert set(ends.values()) == {FINISH_STOP} and not any(errors.values())
    controls = {tokenizer.token_id(name) for name in ("<|begin|>", "<|user|>", "<tool_call>", "</tool_call>")}
    for request, ids in tokens.items():
        assert tokenizer.decode(ids) == expected[request] and controls.isdisjoint(ids)


@pytest.mark.parametrize(
    "model",
    [
        models.BPE({"<unk>": 0, "<s>": 1, "<": 2, "s": 3, ">": 4}, [], unk_token="<unk>"),
        models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("<", -1.0), ("s", -1.0), (">", -1.0)], unk_id=0),
    ],
    ids=["bpe", "unigram"],
)
def test_ids_stay_where_control_tokens_are_in_the_vocabulary(model):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>"), AddedToken("[NEW]")])
    renamed = Tokenizer.from_str(unspellable(backend))
    assert backend.encode("<s>").ids == [1] and renamed.encode("<s>").ids == [2, 3, 4]
    assert renamed.get_vocab_size() == backend.get_vocab_size()
    before, after = backend.get_added_tokens_decoder(), renamed.get_added_tokens_decoder()
    assert before.keys() == after.keys() and not {t.content for t in before.values()} & {
        t.content for t in after.values()
    }
