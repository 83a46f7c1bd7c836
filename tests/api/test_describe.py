"""The body of image to text becomes a chat about one picture."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.types import ModelLimits
from serve_app.tasks.image_to_text.task import MAX_TOKENS, PROMPT, parse_describe
from serve_app.tasks.task import Body

SEES = ModelLimits(takes=frozenset({"text", "image"}))
FILE = b"\x89PNG..."


def read(body: dict, limits: ModelLimits = SEES):
    return parse_describe(Body(body), "m", limits)


@pytest.mark.parametrize(
    "body",
    [Body({"image": list(FILE)}), Body({"image": base64.b64encode(FILE).decode()}), Body(data=FILE),
     Body({"image": f"data:image/png;base64,{base64.b64encode(FILE).decode()}", "prompt": ""})],
    ids=["numbers", "base64", "the file", "a data URL"],
)  # fmt: skip
def test_a_picture_comes_in_each_shape(body):
    request = parse_describe(body, "m", SEES)
    [message] = request.messages
    picture, text = message["content"]
    assert base64.b64decode(picture["source"]["data"]) == FILE and text["text"] == PROMPT
    assert request.sampling.max_tokens == MAX_TOKENS and not request.stream


def test_what_is_asked_and_how_is_taken_over():
    request = read({"image": [1], "prompt": "how many?", "max_tokens": 7, "temperature": 0.5, "seed": 3, "top_k": 4})
    assert request.messages[0]["content"][1]["text"] == "how many?"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.top_k) == (7, 0.5, 3, 4)
    assert read({"image": [1], "max_completion_tokens": 9}).sampling.max_tokens == 9


WRONG = [
    ({}, "image"),
    ({"image": []}, "image"),
    ({"image": "n!"}, "image"),
    ({"image": [1], "stream": True}, "stream"),
    ({"image": [1], "messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"image": [1], "prompt": 3}, "prompt"),
    ({"image": [1], "tools": [{"name": "x"}]}, "tools"),
    ({"image": [1], "n": 2}, "n"),
    ({"image": [1], "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "about"), WRONG)
def test_what_is_wrong_is_named(body, about):
    with pytest.raises(InvalidInput) as told:
        read(body)
    assert told.value.param == about


def test_a_model_that_does_not_see_says_so():
    with pytest.raises(InvalidInput, match="image"):
        read({"image": [1]}, replace(SEES, takes=frozenset({"text"})))
