"""Sounds in every dialect that has them become the same part; what is no file in the request is refused."""

from __future__ import annotations

from functools import partial

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.content import HEARS, SEES
from serve_app.api.fields.files import part_file
from serve_app.api.responses.items import input_parts
from serve_app.api.types import ModelLimits
from serve_app.tasks.text_generation.read import parse_generate
from tests.api import dialects
from tests.api.dialects import TEXT

LIMITS = ModelLimits(takes=HEARS)
FILE, BASE64 = b"RIFF", "UklGRg=="
URL = f"data:audio/mpeg;base64,{BASE64}"
said = partial(dialects.said, limits=LIMITS)


@pytest.mark.parametrize(("dialect", "part", "form"), [
    ("chat", {"type": "input_audio", "input_audio": {"data": BASE64, "format": "mp3"}}, "mp3"),
    ("chat", {"type": "audio_url", "audio_url": {"url": URL}}, "mpeg"),
    ("responses", {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, "wav"),
    ("native", {"type": "input_audio", "input_audio": {"data": URL}}, "mpeg"),
    ("native", {"type": "audio", "audio": [*FILE]}, "wav"),
    ("native", {"type": "audio", "audio": BASE64}, "wav"),
])  # fmt: skip
def test_all_dialects_say_the_same(dialect, part, form):
    heard, text = said(dialect, part)
    assert heard == {"type": "audio", "source": {"data": BASE64, "format": form}} and text == TEXT
    assert part_file(heard, "x") == FILE
    for limits in (ModelLimits(), ModelLimits(takes=SEES)):
        with pytest.raises(InvalidInput, match=f'"{part["type"]}" are not supported; send text'):
            said(dialect, part, limits=limits)


@pytest.mark.parametrize(("dialect", "part", "why"), [
    ("chat", {"type": "input_audio"}, "must be an object with data and format"),
    ("chat", {"type": "input_audio", "input_audio": {"format": "wav"}}, "must be base64"),
    ("chat", {"type": "input_audio", "input_audio": {"data": BASE64, "format": 5}}, "format must be a string"),
    ("chat", {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}, "not fetched; send the file"),
    ("chat", {"type": "audio_url", "audio_url": "data:audio/wav,x"}, "with ;base64"),
    ("responses", {"type": "input_audio", "file_id": "file-1"}, "were uploaded are not read"),
    ("native", {"type": "audio", "audio": [300]}, "whole numbers from 0 to 255"),
    ("native", {"type": "audio", "audio": 5}, "must be base64"),
])  # fmt: skip
def test_what_is_no_file_is_refused(dialect, part, why):
    with pytest.raises(InvalidInput, match=why):
        said(dialect, part)


@pytest.mark.parametrize("audio", [[*FILE], BASE64, URL], ids=["numbers", "base64", "data URL"])
def test_the_native_field_stands_before_the_question(audio):
    for body in ({"prompt": "What?"}, {"messages": [{"role": "user", "content": "What?"}]}):
        request = parse_generate({**body, "audio": audio}, "m", LIMITS)
        heard, text = request.messages[0]["content"]
        assert request.prompt is None and part_file(heard, "x") == FILE and text == TEXT
        for limits in (ModelLimits(), ModelLimits(takes=SEES)):
            with pytest.raises(InvalidInput, match="audio is not supported"):
                parse_generate({**body, "audio": audio}, "m", limits)
    with pytest.raises(InvalidInput, match="exclude each other"):
        parse_generate({"prompt": "x", "raw": True, "audio": audio}, "m", LIMITS)


def test_a_model_that_sees_and_hears_takes_both():
    body = {"prompt": "What?", "image": "iVBORw==", "audio": BASE64}
    content = parse_generate(body, "m", ModelLimits(takes=SEES | HEARS)).messages[0]["content"]
    assert [part["type"] for part in content] == ["image", "audio", "text"]


def test_responses_show_what_was_said():
    content = said("responses", {"type": "input_audio", "input_audio": {"data": BASE64, "format": "mp3"}})
    assert input_parts(content) == [
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "mp3"}},
        {"type": "input_text", "text": "What?"},
    ]
