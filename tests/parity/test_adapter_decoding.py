"""Greedy tokens with an adapter equal PEFT's where weights are rounded, and where a grammar holds the answer."""

from __future__ import annotations

import re
import shutil

import pytest
from peft import LoraConfig, PeftModel

from serve_app.engine.constrain import Masks
from serve_app.grammar.matcher import Grammars
from serve_app.grammar.rules import grammar, regex_rule
from serve_app.models.quantization import quantize_linears
from serve_app.text.tokenizer import Tokenizer
from tests import tiny
from tests.grammar.conftest import PICO, VOCAB
from tests.parity.test_adapters import NEW_TOKENS, make, prompts, read
from tests.variants import some

EVERY = LoraConfig(r=5, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
ASKED = prompts()[1:4]


@pytest.mark.parametrize("name", some(["int8", "int4"], "int4"))
def test_a_base_with_rounded_weights(tmp_path, name):
    """PEFT runs on transformers' model with its linears rounded alike: the adapter is no part of what is rounded."""
    path = tiny.write_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=2)
    folder = make(tiny.load_reference(path), tmp_path / "adapter", EVERY, 1)
    base = tiny.load_reference(path)
    assert " 0 linears" not in quantize_linears(base, name)
    peft = PeftModel.from_pretrained(base, folder).eval()
    wanted = [tiny.reference_tokens(peft, prompt, NEW_TOKENS) for prompt in ASKED]
    model = tiny.load(path, optimise=True, adapters=1, quantization=name)
    model.adapters.put(1, read(model, folder))
    engine = tiny.make_engine(model, num_blocks=200)
    for index, prompt in enumerate(ASKED):
        request = tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS)
        request.adapter = 1
        engine.add(request)
    found = tiny.run_all(engine)
    assert [found[str(index)] for index in range(len(wanted))] == wanted
    plain = tiny.load_reference(path)
    assert [tiny.reference_tokens(plain, prompt, NEW_TOKENS) for prompt in ASKED] != wanted


@pytest.mark.slow  # every token is tried at every step
def test_an_answer_that_a_grammar_holds(tmp_path):
    """The truth asks of every token whether it goes on with such a text, and takes the likeliest that does. No part of
    the text follows from what stands before it: that would be written in its usual tokens, whatever is likeliest.
    """
    path = tiny.write_checkpoint(tmp_path / "base", "llama", vocab_size=VOCAB, num_hidden_layers=2)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, path / file)
    folder = make(tiny.load_reference(path), tmp_path / "adapter", EVERY, 1)
    peft = PeftModel.from_pretrained(tiny.load_reference(path), folder).eval()
    model = tiny.load(path, optimise=True, adapters=1)
    model.adapters.put(1, read(model, folder))
    grammars, tokenizer = Grammars(path, model.vocab_size, model.eos_token_ids), Tokenizer(path)
    whole, held = 12, grammar(regex_rule("[a-f0-9]{12}"), {})
    texts = {token: tokenizer.token_text(token) for token in range(7, VOCAB - 2)}
    [end, *_] = model.eos_token_ids

    def written(place: int, prompt: list[int]) -> str:
        engine = tiny.make_engine(model, num_blocks=100)
        engine.runner.masks = Masks(grammars)
        request = tiny.make_request("1", prompt, max_tokens=30, grammar=held)
        request.adapter = place
        engine.runner.masks.compile(request)
        engine.add(request)
        return tokenizer.decode([token for token in tiny.run_all(engine)["1"] if token != end])

    def truth(prompt: list[int]) -> str:
        def allowed(_: int, ids) -> list[int]:
            sofar = tokenizer.decode(ids[len(prompt) :].tolist())
            if len(sofar) == whole:
                return [end]
            return [t for t, text in texts.items() if text and re.fullmatch("[a-f0-9]{1,12}", sofar + text)]

        tokens = tiny.reference_tokens(peft, prompt, 30, prefix_allowed_tokens_fn=allowed, eos_token_id=end)
        return tokenizer.decode([token for token in tokens if token != end])

    wanted = [truth(prompt) for prompt in ASKED]
    assert [written(1, prompt) for prompt in ASKED] == wanted
    assert all(re.fullmatch("[a-f0-9]{12}", text) for text in wanted)
    # Without the adapter it would have been others.
    assert [written(0, prompt) for prompt in ASKED] != wanted
