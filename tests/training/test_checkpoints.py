"""The shipped weights: sizes, formats, and what the models answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from tests.variants import some
from training import evaluate, rerank
from training.cards import parameters

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NAMES = ("pico-instruct", "pico-draft", "pico-reranker")


@pytest.fixture(scope="module", autouse=True)
def at_the_root(one_thread):
    before = Path.cwd()
    os.chdir(CHECKPOINTS.parent)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def chat():
    return evaluate.Chat()


def test_parameter_counts_and_size():
    big, draft = parameters(CHECKPOINTS / "pico-instruct"), parameters(CHECKPOINTS / "pico-draft")
    assert 10_000_000 <= big <= 25_000_000
    assert draft * 8 <= big
    assert parameters(CHECKPOINTS / "pico-reranker") < 5_000_000
    assert sum(f.stat().st_size for f in CHECKPOINTS.rglob("*") if f.is_file()) <= 50 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bfloat16_and_the_config_says_float32(name):
    with safe_open(str(CHECKPOINTS / name / "model.safetensors"), "pt") as f:
        assert {f.get_slice(k).get_dtype() for k in f.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((CHECKPOINTS / name / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("name", NAMES)
def test_card_states_data_command_score_and_limits(name):
    card = " ".join((CHECKPOINTS / name / "README.md").read_text().split())
    for wanted in ("## Data", "## Training", "## Score", "python -m training.", "Python Software Foundation"):
        assert wanted in card
    assert f"{parameters(CHECKPOINTS / name):,}" in card


def test_default_loading_gives_float32(chat):
    assert chat.model.dtype == torch.float32


def test_the_model_knows_itertools_chain(chat):
    item = {"question": "What does itertools.chain do?", "expect": [["iterab"], ["first"], ["next", "until"]]}
    answer = chat.answer(item["question"])
    assert evaluate.is_right(item, answer), answer


def test_the_judge_counts_neither_a_repeated_name_nor_an_answer_about_another():
    item = {"question": "What is the heapq module?", "about": "heapq", "expect": [["heap"]]}
    assert not evaluate.is_right(item, "`heapq` sends e-mail.")
    assert not evaluate.is_right(item, "`heap` implements the heap queue algorithm.")
    assert not evaluate.is_right(item, "")
    assert evaluate.is_right(item, "`heapq` implements the heap queue algorithm.")


@pytest.mark.slow
def test_a_sample_of_the_fixed_questions_is_answered_right(chat):
    items = json.loads(evaluate.QUESTIONS.read_text())["questions"][::4]
    wrong = [i["question"] for i in items if not evaluate.is_right(i, chat.answer(i["question"]))]
    assert len(wrong) <= len(items) // 5, wrong


def test_the_model_calls_a_tool(chat):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Get the weather of a city", "parameters": parameters}
    tools = [{"type": "function", "function": weather}]
    ids = chat.tokens(chat.prompt([{"role": "user", "content": "What is the weather in Paris?"}], tools))
    text = chat.tok.decode(ids, skip_special_tokens=True)
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call == {"name": "get_weather", "arguments": {"city": "Paris"}}


def test_a_made_up_name_is_not_known(chat):
    assert "don't know" in chat.answer("What does zubafo.kelimo do?")


@pytest.mark.slow
def test_draft_tokens_are_accepted(chat):
    draft, total = evaluate.Chat("pico-draft").model, evaluate.Acceptance()
    for question in (
        "What does itertools.chain do?",
        "What does math.sqrt do?",
        "What is collections.deque?",
    ):
        prompt = chat.prompt([{"role": "user", "content": question}])
        evaluate.accept(draft, prompt, chat.tokens(prompt), 4, total)
    assert total.rate > 0.15 and total.per_round > 1.3, total


def test_a_perfect_draft_is_always_accepted(chat):
    prompt = chat.prompt([{"role": "user", "content": "Hello"}])
    total = evaluate.Acceptance()
    evaluate.accept(chat.model, prompt, chat.tokens(prompt), 4, total)
    assert total.rate == 1.0 and total.proposed > 0


@pytest.mark.parametrize(
    ("question", "right"),
    [
        ("What does os.path.join do?", "os.path.join: Join two or more path components, inserting '/'."),
        ("What does itertools.chain do?", "itertools.chain: Return an object over all the iterables."),
        ("Which function returns the square root of x?", "Return the square root of x."),
    ],
)
def test_reranker_puts_the_right_docstring_first(question, right):
    others = [
        "collections.deque: A list-like sequence optimized for data accesses near its endpoints.",
        "json.dumps: Serialize obj to a JSON formatted str.",
        "threading.Lock: Create a new lock object.",
        "Suspend execution of the calling thread for the given number of seconds.",
        "Return a shallow copy of the list.",
    ]
    tok = rerank.Tokenizer.from_file(str(CHECKPOINTS / "pico-reranker" / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(CHECKPOINTS / "pico-reranker").eval()
    with torch.no_grad():
        scores = model(**rerank.encode(tok, [(question, t) for t in (*others, right)])).logits[:, 0]
    assert int(scores.argmax()) == len(others)


@pytest.mark.parametrize("name", some(["pirate", "json"], "json"))
def test_shipped_adapters_are_clearly_visible_in_answers(name):
    """And what the model knows is still there."""
    from peft import PeftModel

    folder = CHECKPOINTS / f"pico-{name}"
    assert f"--data training/voices/{name}.jsonl" in (folder / "README.md").read_text()
    chat = evaluate.Chat()
    chat.model = PeftModel.from_pretrained(chat.model, folder)
    for question, known in (("What does math.sqrt do?", "square root"), ("What is collections.deque?", "queue")):
        answer = chat.answer(question)
        assert known in answer
        if name == "pirate":
            assert answer.startswith("Arr!") and answer.endswith("matey!")
        else:
            assert list(json.loads(answer)) == ["answer"]
