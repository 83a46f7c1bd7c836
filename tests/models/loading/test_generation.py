"""A folder's generation_config.json decides about greedy answers as it does in transformers' ``generate``."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.request import Request
from serve_app.engine.rules import Rules
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.generation import end_tokens, read_rules, take_generation_config
from serve_app.models.loading.weights import load_module
from serve_app.sampling_params import SamplingParams
from tests import tiny

NEW = 20
# The loops that greedy answers of random weights run into are what most of these are for.
CONFIGS = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.8},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "no repeated triple": {"no_repeat_ngram_size": 3},
    "no token twice": {"no_repeat_ngram_size": 1},
    "nothing of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "suppressed": {"suppress_tokens": [7, 12, 100000, *range(40, 120)]},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(0, 256, 2))},
    "suppressed behind what is forced": {"begin_suppress_tokens": list(range(128)), "forced_bos_token_id": 200},
    "forced end": {"forced_eos_token_id": [31, 9], "no_repeat_ngram_size": 2},
    "least": {"eos_token_id": [56, 112], "min_new_tokens": 15},
    "least with the prompt": {"eos_token_id": [*range(30), 57], "min_length": 20},
    "several ends": {"eos_token_id": [2, *range(10, 60)]},
    "another end": {"eos_token_id": 56},
    "all": {
        "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "suppress_tokens": [4, 5], "min_new_tokens": 9,
        "eos_token_id": [2, *range(60, 90)], "forced_eos_token_id": 3, "bad_words_ids": [[2], [61], [9]],
    },
}  # fmt: skip
SLOW = set(CONFIGS) - {"all", "no repeated pair", "forced end"}
PROMPTS = [[17], [3, 9, 200, 9, 200], [(7 * i * i + 5) % 250 for i in range(60)], [11, 12, 13] * 10]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def loaded(folder):
    """The model and transformers' own; both take the folder's generation config anew in each test."""
    return tiny.load(folder), tiny.load_reference(folder)


@pytest.fixture
def configured(folder, tmp_path):
    """Writes a generation_config.json beside the weights; the folder."""

    def write(values, file="generation_config.json"):
        for path in folder.iterdir():
            if path.name != "generation_config.json":
                (tmp_path / path.name).write_bytes(path.read_bytes())
        before = json.loads((tmp_path / file).read_text()) if (tmp_path / file).is_file() else {}
        (tmp_path / file).write_text(json.dumps(before | values))
        return tmp_path

    return write


def answers(model, speculate: bool = False, **limits) -> tuple[list[list[int]], int]:
    """What the engine makes of the prompts twice, and how many requests made way."""
    limits.setdefault("kv_cache_bytes", 200 * model.kv_shape.block_bytes)
    engine = build_engine(model, EngineLimits(**limits))
    if speculate:
        engine.speculation = Speculation([NgramProposer()], VerifyEverything(4), vocab_size=model.vocab_size)
    for index, prompt in enumerate([*PROMPTS, *PROMPTS]):
        params = SamplingParams(temperature=0.0, max_tokens=NEW)
        engine.add(Request(str(index), list(prompt), len(prompt), params, tiny.ROOT))
    found = tiny.run_all(engine)
    return [found[str(i)] for i in range(2 * len(PROMPTS))], engine.scheduler.preemptions


def expected(path, reference=None) -> list[list[int]]:
    reference = reference or tiny.load_reference(path)
    return [tiny.reference_tokens(reference, prompt, NEW) for prompt in PROMPTS]


def both(loaded, path):
    """As if model and reference were loaded from ``path``, whose weights they have."""
    for module in (loaded[0].module, loaded[1]):
        take_generation_config(module, path)
    return replace(
        loaded[0], rules=read_rules(loaded[0].module, path)[0], eos_token_ids=end_tokens(loaded[0].module, path)
    )


@pytest.fixture(scope="module")
def plain(loaded):
    """Answers without any rules."""
    return answers(loaded[0])[0]


@pytest.mark.parametrize(
    "values",
    [pytest.param(v, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, v in CONFIGS.items()],
)
def test_answers_are_those_of_generate(configured, loaded, plain, values):
    path = configured({"eos_token_id": 2, **values})
    model = both(loaded, path)
    wanted = expected(path, loaded[1])
    assert answers(model, max_batch_tokens=32)[0] == wanted * 2 != plain
    assert answers(model, speculate=True)[0] == wanted * 2


def test_bad_words(configured, loaded, plain):
    """Words that the answers have otherwise, of one token to four."""
    words = [answer[at : at + n] for n, answer in enumerate(plain[: len(PROMPTS)], 1) for at in (0, 3)]
    path = configured({"eos_token_id": 2, "bad_words_ids": [*words, [2], PROMPTS[1]]})
    model = both(loaded, path)
    wanted = expected(path, loaded[1])
    assert answers(model)[0] == answers(model, speculate=True)[0] == wanted * 2 != plain


@pytest.mark.slow
def test_after_preemption(configured, loaded):
    path = configured({"no_repeat_ngram_size": 2, "begin_suppress_tokens": list(range(99)), "min_new_tokens": NEW})
    model = both(loaded, path)
    found, preempted = answers(model, kv_cache_bytes=6 * model.kv_shape.block_bytes)
    assert found == expected(path, loaded[1]) * 2 and preempted


def test_a_request_says_otherwise(configured):
    path = configured({"repetition_penalty": 1.5})
    model, reference = tiny.load(path), tiny.load_reference(path)
    without = tiny.reference_tokens(reference, PROMPTS[2], 16, repetition_penalty=1.0)
    engine = build_engine(model, EngineLimits(kv_cache_bytes=20 * model.kv_shape.block_bytes))
    engine.add(tiny.make_request("off", PROMPTS[2], repetition_penalty=1.0, ignore_eos=True))
    engine.add(tiny.make_request("on", PROMPTS[2], ignore_eos=True))
    found = tiny.run_all(engine)
    assert found["on"] != found["off"] == without


@pytest.mark.slow
def test_what_older_folders_have_in_their_configuration(configured):
    path = configured({"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, "config.json")
    wanted = expected(path)
    model = tiny.load(path)
    assert answers(model)[0] == wanted * 2
    # As on a GPU, where the folder is read by our own reader.
    module, _ = load_module(
        type(model.module), path, attn_implementation="eager", dtype=torch.float32, device=torch.device("cpu")
    )
    assert module.generation_config.to_dict() == tiny.load_reference(path).generation_config.to_dict()


def test_ends_are_those_of_generate(configured):
    assert tiny.load(configured({"eos_token_id": [5, 9]})).eos_token_ids == frozenset({5, 9})
    # There generate would never end.
    assert tiny.load(configured({"do_sample": False, "eos_token_id": None})).eos_token_ids == frozenset({2})


def test_a_folder_that_asks_for_nothing_costs_nothing(configured):
    model = tiny.load(configured({"eos_token_id": 2, "temperature": 0.6, "repetition_penalty": 1.0, "num_beams": 1}))
    assert model.rules is None and "generation_config" not in model.report


def test_what_is_not_followed_is_named(configured, caplog):
    with caplog.at_level(logging.WARNING, "serve_app.models.loading.generation"):
        model = tiny.load(configured({"num_beams": 4, "guidance_scale": 1.5, "repetition_penalty": 1.1}))
    assert model.report["generation_config"] == "not followed: num_beams, guidance_scale"
    assert "num_beams, guidance_scale" in caplog.text and model.rules == Rules(repetition_penalty=1.1)


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0}, {"repetition_penalty": "high"}, {"repetition_penalty": float("nan")},
        {"no_repeat_ngram_size": -1}, {"no_repeat_ngram_size": 1.5}, {"suppress_tokens": ["a"]},
        {"suppress_tokens": {"a": 1}}, {"bad_words_ids": [7]}, {"bad_words_ids": [[]]}, {"min_length": True},
        {"forced_eos_token_id": "x"}, {"eos_token_id": [None]}, {"begin_suppress_tokens": [[1]]},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_a_wrong_kind_are_refused(configured, values):
    [name] = values
    with pytest.raises(UnsupportedModel, match=name):
        tiny.load(configured(values))


def test_a_grammar_goes_before_bans():
    rules = Rules(repetition_penalty=1.2, suppress=frozenset({3}), no_repeat_ngram_size=1, min_new_tokens=4)
    request = tiny.make_request("x", [1, 2], grammar="start: /a/")
    rules.rule(request)
    sampling = request.sampling
    assert (sampling.repetition, sampling.logit_bias, sampling.min_tokens, request.rules) == (1.2, None, 0, None)
