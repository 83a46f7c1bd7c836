"""The playground in a real Chromium: what is asked for is what the API is sent, and its answer is what is shown."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import CHAT, EMBED, RERANK

QUESTION = "What does itertools.chain do?"
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def ask(page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page, number: int = 1) -> list[str]:
    """The texts of so many answers, when all are there."""
    page.get_by_role("button", name="Copy answer", exact=True).nth(number - 1).wait_for()
    return page.locator(".prose").all_inner_texts()


def said(http, **asked: object) -> str:
    """What the API answers, as the page shows it."""
    body = {"model": CHAT, "messages": [{"role": "user", "content": QUESTION}], **asked}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"].replace("`", "")


@pytest.mark.slow
def test_two_settings_stand_side_by_side(tab, http):
    page = tab.page
    tab.open(f"#/playground?model={CHAT}")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="Right", exact=True).click()
    page.get_by_label("Adapter", exact=True).select_option(label="pirate")
    page.get_by_role("button", name="Left", exact=True).click()
    assert page.get_by_label("Adapter", exact=True).input_value() == ""
    ask(page, QUESTION)
    assert answered(page, 2) == [said(http), said(http, lora="pirate")]
    assert page.locator(".stats").count() == 2
    # One again: the left one stays as it is.
    page.get_by_role("button", name="One model", exact=True).click()
    assert answered(page) == [said(http)]


@pytest.mark.slow
def test_parameters_are_those_of_the_request(tab, http):
    page, sent = tab.page, []
    page.on("request", lambda one: one.url.endswith("/chat/completions") and sent.append(one.post_data_json))
    tab.open(f"#/playground?model={CHAT}")
    asked = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "max_tokens": 24, "seed": 7, "repetition_penalty": 1.1}
    labels = {"max_tokens": "Most tokens", "top_p": "Top p", "top_k": "Top k"}
    for name, value in asked.items():
        label = labels.get(name, name.replace("_", " ").capitalize())
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_label("System prompt", exact=True).fill("Answer in a word.")
    ask(page, QUESTION)
    [shown] = answered(page)
    messages = [{"role": "system", "content": "Answer in a word."}, {"role": "user", "content": QUESTION}]
    assert {name: sent[0].get(name) for name in asked} == asked and sent[0]["messages"] == messages
    # The same seed gives the same answer.
    again = http.post("/v1/chat/completions", json={"model": CHAT, "messages": messages, **asked}).json()
    words = again["choices"][0]["message"]["content"].replace("`", "").split()
    assert shown.split() == words


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_goes_on(tab):
    page, sent = tab.page, []
    page.on("request", lambda one: one.url.endswith("/chat/completions") and sent.append(one.post_data_json))
    tab.open(f"#/playground?model={CHAT}")
    page.get_by_label("Tools", exact=True).fill(json.dumps([WEATHER]))
    ask(page, "What is the weather in Paris?")
    result = page.get_by_label("What the tool answers", exact=True)
    result.wait_for()
    call = page.locator(".call")
    assert call.locator("strong").inner_text() == "get_weather"
    arguments = json.loads(call.locator("pre").inner_text())
    assert set(arguments) == {"city"}
    result.fill('{"temperature": 21, "sky": "sunny"}')
    page.get_by_role("button", name="Give the result", exact=True).click()
    assert answered(page)
    *_, asking, told = sent[-1]["messages"]
    assert told["role"] == "tool" and told["tool_call_id"] == asking["tool_calls"][0]["id"]
    assert json.loads(asking["tool_calls"][0]["function"]["arguments"]) == arguments


@pytest.mark.slow
def test_an_answer_is_held_to_a_schema(tab):
    page = tab.page
    tab.open(f"#/playground?model={CHAT}")
    schema = page.get_by_label("JSON schema", exact=True)
    schema.fill('{"type": ')
    ask(page, QUESTION)
    page.locator(".toast-bad").get_by_text("JSON schema is no JSON").wait_for()
    # What was typed is still there, and nothing was sent.
    assert page.get_by_label("Message", exact=True).input_value() == QUESTION and not page.locator(".message").count()
    kept = {"type": "object", "properties": {"useful": {"type": "boolean"}}, "required": ["useful"]}
    schema.fill(json.dumps(kept | {"additionalProperties": False}))
    page.get_by_label("Message", exact=True).press("Enter")
    [shown] = answered(page)
    assert isinstance(json.loads(shown)["useful"], bool)


@pytest.mark.slow
def test_an_answer_is_stopped(tab, http, stack):
    page = tab.page
    tab.open(f"#/playground?model={CHAT}")
    # It cannot end by itself before it has written a good deal.
    long = {"type": "object", "properties": {"text": {"type": "string", "minLength": 3000}}, "required": ["text"]}
    page.get_by_label("JSON schema", exact=True).fill(json.dumps(long))
    ask(page, QUESTION)
    page.get_by_text('{"text"').first.wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("stopped", exact=True).wait_for()
    request = page.locator(".trace a")
    page.get_by_role("button", name="Trace", exact=True).click()
    request.wait_for()
    told = http.get(f"{stack.url}/v1/requests/{request.inner_text().split()[-1]}").json()
    assert told["status"] == "left"
    # One goes on from what was written.
    page.get_by_label("JSON schema", exact=True).fill("")
    ask(page, QUESTION)
    page.get_by_role("button", name="Copy answer", exact=True).nth(1).wait_for()


@pytest.mark.slow
def test_reasoning_is_folded(tab):
    """None of the models here reasons: this is the answer of one that does."""
    page = tab.page
    deltas = [{"reasoning_content": "First "}, {"reasoning_content": "this."}, {"content": "So be it."}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    tab.open(f"#/playground?model={CHAT}")
    ask(page, "Think.")
    assert answered(page) == ["So be it."]
    reasoning = page.get_by_text("First this.", exact=True)
    assert not reasoning.is_visible()
    page.get_by_text("Reasoning", exact=True).click()
    reasoning.wait_for()


@pytest.mark.slow
def test_similarities_are_those_of_the_vectors(tab, run):
    page = tab.page
    tab.open(f"#/playground?model={EMBED}")
    texts = ["A cat sleeps.", "A kitten naps.", "Stocks fell."]
    page.get_by_label("One text on each line", exact=True).fill("\n".join(texts))
    page.get_by_role("button", name="Compare 3 texts", exact=True).click()
    map_ = page.get_by_role("region", name="Similarity of each pair", exact=True)
    map_.wait_for()
    shown = [[float(one) for one in row.locator("td").all_inner_texts()] for row in map_.locator("tbody tr").all()]
    vectors = run(EMBED, {"text": texts})["data"]
    alike = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in vectors] for x in vectors]
    assert shown == [[pytest.approx(value, abs=0.011) for value in row] for row in alike]
    assert shown[0][1] > shown[0][2]


@pytest.mark.slow
def test_passages_are_sorted_as_the_api_scores_them(tab, run):
    page = tab.page
    tab.open(f"#/playground?model={RERANK}")
    texts = ["Close a file.", "Return the square root of x.", "Sort a list in place."]
    page.get_by_label("One passage on each line", exact=True).fill("\n".join(texts))
    page.get_by_role("button", name="Sort 3 passages", exact=True).click()
    page.locator(".ranked li").nth(2).wait_for()
    asked = {"query": page.get_by_label("Question", exact=True).input_value(), "contexts": [{"text": t} for t in texts]}
    told = run(RERANK, asked)["response"]
    assert page.locator(".ranked .wrap").all_inner_texts() == [texts[one["id"]] for one in told]
    scores = [float(one) for one in page.locator(".ranked strong").all_inner_texts()]
    assert scores == [pytest.approx(one["score"], abs=2e-4) for one in told]
