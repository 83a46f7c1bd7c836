"""A random model with the shipped tokenizer: it has no idea of JSON, so whatever it writes well the grammar did."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from serve_app.engine.constrain import Masks
from serve_app.grammar.matcher import Grammars
from tests import tiny

PICO = Path(__file__).resolve().parents[2] / "checkpoints" / "pico-instruct"
VOCAB = 6144


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("random"), "llama", vocab_size=VOCAB, num_hidden_layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, path / name)
    return path


@pytest.fixture(scope="package")
def model(folder):
    return tiny.load(folder)


@pytest.fixture(scope="package")
def grammars(folder, model) -> Grammars:
    return Grammars(folder, model.vocab_size, model.eos_token_ids)


@pytest.fixture(scope="package")
def tokenizer(folder):
    from serve_app.text.tokenizer import Tokenizer

    return Tokenizer(folder)


@pytest.fixture(scope="package")
def closing(tokenizer) -> dict[int, float]:
    """A bias towards tokens that end strings, arrays and objects: noise alone would hardly ever come to an end."""
    texts = {i: tokenizer.token_text(i) for i in range(7, 6142)}
    return {i: 9.0 if text == '"' else 6.0 for i, text in texts.items() if text in ('"', '"}', "]", "}", '",', '"]')}


@pytest.fixture
def engine(model, grammars):
    def make(**options):
        made = tiny.make_engine(model, **{"num_blocks": 400, **options})
        made.runner.masks = Masks(grammars)
        return made

    return make
