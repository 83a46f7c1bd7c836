"""Questions about a drawn picture, asked of the shipped model that sees: in each dialect, from its first start on."""

from __future__ import annotations

import base64
from io import BytesIO
from random import Random

import httpx
import pytest

from tests.media.files import sound
from tests.media.hostile import hostile_pictures, hostile_sounds
from tests.variants import some
from training.looking import draw

VISION, DESCRIBER = "@cf/pico/pico-vision", "@cf/pico/pico-describer"
SHAPES, HEARING = "@cf/pico/pico-shapes", "@cf/pico/pico-hearing"


@pytest.fixture
def root(stack):
    with httpx.Client(base_url=stack.url, headers=stack.headers, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def shown() -> tuple[str, str]:
    """A picture of one thing, in base64, and what it is."""
    picture, [thing] = draw(Random("one red circle"), 1)
    out = BytesIO()
    picture.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode(), f"{thing.colour} {thing.kind}"


def test_every_dialect_shows_it(stack, root, shown) -> None:
    data, thing = shown
    url = f"data:image/png;base64,{data}"
    question = "What do you see?"
    # The first request waits until the model has started.
    asked = {"prompt": question, "image": data, "max_tokens": 24}
    native = root.post(f"{stack.api}/run/{VISION}", json=asked, timeout=180).json()["result"]
    assert thing in native["response"]
    text = {"type": "text", "text": question}
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]
    asked = {"model": VISION, "messages": chat, "max_tokens": 24}
    openai = root.post("/v1/chat/completions", json=asked).json()
    assert openai["choices"][0]["message"]["content"] == native["response"]
    used = openai["usage"]
    assert used["prompt_tokens"] == native["usage"]["prompt_tokens"] > 64
    assert used["prompt_tokens_details"]["cached_tokens"] >= 64, "the picture was neither encoded nor prefilled again"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    claude = root.post("/v1/messages", json={
        "model": VISION, "max_tokens": 24, "messages": [{"role": "user", "content": [block, text]}],
    }).json()  # fmt: skip
    assert claude["content"][0]["text"] == native["response"]
    part = {"type": "input_image", "image_url": url}
    told = [{"role": "user", "content": [part, {"type": "input_text", "text": question}]}]
    responses = root.post("/v1/responses", json={"model": VISION, "input": told, "max_output_tokens": 24}).json()
    assert responses["output"][-1]["content"][0]["text"] == native["response"]
    ollama = root.post("/api/chat", json={
        "model": VISION, "stream": False, "messages": [{"role": "user", "content": question, "images": [data]}],
    }).json()  # fmt: skip
    assert ollama["message"]["content"] == native["response"]


def test_a_picture_is_described(stack, root, shown) -> None:
    """By the task's own body, as numbers, base64 or the file itself, and by a chat with the same model."""
    data, thing = shown
    file, url = base64.b64decode(data), f"data:image/png;base64,{data}"
    where, limit, question = f"{stack.api}/run/{DESCRIBER}", {"max_tokens": 24}, "What do you see?"
    bodies = [{"image": list(file)}, {"image": data, "prompt": question}, {"image": url}]
    answers = [root.post(where, json={**body, **limit}, timeout=180) for body in bodies]
    answers.append(root.post(where, content=file, headers={"Content-Type": "image/png"}))
    assert [answer.status_code for answer in answers] == [200] * 4
    [found] = {answer.json()["result"]["description"] for answer in answers}
    assert thing in found and answers[0].json()["result"].keys() == {"description"}
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    asked = {"model": DESCRIBER, "messages": [{"role": "user", "content": parts}], **limit}
    chat = root.post("/v1/chat/completions", json=asked).json()
    assert chat["choices"][0]["message"]["content"].strip() == found
    cut = base64.b64encode(file[:60]).decode()
    for wrong in (
        {},
        {"image": data, "stream": True},
        {"image": "n!"},
        {"image": cut},
        {"image": data, "max_tokens": 0},
    ):
        told = root.post(where, json=wrong)
        assert told.status_code == 400 and told.json()["errors"][0]["code"] == 5006, wrong


def test_what_is_no_picture_is_refused_and_a_model_that_does_not_see_says_so(root, shown) -> None:
    def answer(model: str, url: str) -> tuple[int, str]:
        part = {"type": "image_url", "image_url": {"url": url}}
        asked = {"model": model, "messages": [{"role": "user", "content": [part]}]}
        found = root.post("/v1/chat/completions", json=asked)
        return found.status_code, found.json()["error"]["message"]

    broken = base64.b64encode(base64.b64decode(shown[0])[:60]).decode()
    status, told = answer(VISION, f"data:image/png;base64,{broken}")
    assert status == 400 and "messages[0].content" in told
    status, told = answer(VISION, "https://example.com/cat.png")
    assert status == 400 and "not fetched" in told
    status, told = answer("@cf/pico/pico-instruct", f"data:image/png;base64,{shown[0]}")
    assert status == 400 and "send text parts" in told


@pytest.mark.parametrize("model", some([DESCRIBER, SHAPES, HEARING], DESCRIBER))
def test_files_that_would_take_long_or_much_are_refused_and_the_next_is_answered(stack, root, shown, model) -> None:
    """Raw bodies, decoded beside the gateway and beside the workers."""
    where = f"{stack.api}/run/{model}"
    sounds = model == HEARING
    good = sound(1.0) if sounds else base64.b64decode(shown[0])
    headers = {"Content-Type": "application/octet-stream"}
    assert root.post(where, content=good, headers=headers, timeout=180).status_code == 200
    for name, data in (hostile_sounds() if sounds else hostile_pictures()).items():
        told = root.post(where, content=data, headers=headers)
        assert told.status_code == 400 and told.json()["errors"][0]["code"] == 5006, (name, told.text[:200])
    assert root.post(where, content=good, headers=headers).status_code == 200
