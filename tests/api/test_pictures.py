"""Pictures in every dialect become the same part; what is no file in the request is refused with what to send."""

from __future__ import annotations

from functools import partial

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.content import SEES
from serve_app.api.fields.files import part_file
from serve_app.api.fields.pictures import data_url
from serve_app.api.ollama.read import parse_ollama_chat, parse_ollama_generate
from serve_app.api.responses.items import input_parts
from serve_app.api.types import ModelLimits
from serve_app.tasks.text_generation.read import parse_generate
from tests.api import dialects
from tests.api.dialects import TEXT

LIMITS = ModelLimits(takes=SEES)
FILE, BASE64 = b"\x89PNG", "iVBORw=="
URL = f"data:image/webp;base64,{BASE64}"
said = partial(dialects.said, limits=LIMITS)


@pytest.mark.parametrize(("dialect", "part", "kind"), [
    ("native", {"type": "image_url", "image_url": {"url": URL}}, "image/webp"),
    ("native", {"type": "image", "image": [*FILE]}, "image/png"),
    ("native", {"type": "image", "image": BASE64}, "image/png"),
    ("chat", {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "image/webp"),
    ("chat", {"type": "image_url", "image_url": URL}, "image/webp"),
    ("responses", {"type": "input_image", "image_url": URL, "detail": "auto"}, "image/webp"),
    ("anthropic", {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": BASE64}},
     "image/gif"),
])  # fmt: skip
def test_all_dialects_say_the_same(dialect, part, kind):
    shown, text = said(dialect, part)
    assert shown == {"type": "image", "source": {"data": BASE64, "media_type": kind}} and text == TEXT
    assert part_file(shown, "x") == FILE and data_url(shown) == f"data:{kind};base64,{BASE64}"
    with pytest.raises(InvalidInput, match="not supported"):
        said(dialect, part, limits=ModelLimits())


@pytest.mark.parametrize(("dialect", "part", "why"), [
    ("chat", {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not fetched; send the file"),
    ("chat", {"type": "image_url", "image_url": {"url": "HTTP://169.254.169.254/"}}, "not fetched"),
    ("responses", {"type": "input_image", "image_url": "http://localhost/a"}, "not fetched"),
    ("responses", {"type": "input_image", "file_id": "file-1"}, "were uploaded are not read"),
    ("anthropic", {"type": "image", "source": {"type": "url", "url": "https://example.com"}}, "not fetched"),
    ("anthropic", {"type": "image", "source": {"type": "file", "file_id": "f"}}, 'must be "base64"'),
    ("native", {"type": "image_url"}, "must be a data URL"),
    ("native", {"type": "image_url", "image_url": {"url": "data:image/png,%89PNG"}}, "with ;base64"),
    ("native", {"type": "image", "image": [300]}, "whole numbers from 0 to 255"),
    ("native", {"type": "image", "image": 5}, "must be a data URL"),
])  # fmt: skip
def test_what_is_no_file_is_refused(dialect, part, why):
    with pytest.raises(InvalidInput, match=why) as refused:
        said(dialect, part)
    assert refused.value.param.startswith(("messages[0].content[0]", "input[0].content[0]"))


@pytest.mark.parametrize("image", [[*FILE], BASE64, URL], ids=["numbers", "base64", "data URL"])
def test_the_native_field_stands_before_the_question(image):
    for body in ({"prompt": "What?"}, {"messages": [{"role": "user", "content": "What?"}]}):
        request = parse_generate({**body, "image": image}, "m", LIMITS)
        shown, text = request.messages[0]["content"]
        assert request.prompt is None and part_file(shown, "x") == FILE and text == TEXT
        with pytest.raises(InvalidInput, match="image input is not supported"):
            parse_generate({**body, "image": image}, "m", ModelLimits())
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = parse_generate({"messages": talk, "image": image}, "m", LIMITS).messages
    assert [m["content"] for m in found[:2]] == ["a", "b"] and len(found[2]["content"]) == 2
    with pytest.raises(InvalidInput, match="exclude each other"):
        parse_generate({"prompt": "x", "raw": True, "image": image}, "m", LIMITS)


def test_ollama_has_a_field_of_its_own():
    body = {"model": "m", "messages": [{"role": "user", "content": "What?", "images": [BASE64, BASE64]}]}
    content = parse_ollama_chat(body, "m", LIMITS).messages[0]["content"]
    assert [part["type"] for part in content] == ["image", "image", "text"] and part_file(content[1], "x") == FILE
    asked = {"model": "m", "prompt": "What?", "images": [BASE64]}
    assert [p["type"] for p in parse_ollama_generate(asked, "m", LIMITS).messages[0]["content"]] == ["image", "text"]
    with pytest.raises(InvalidInput, match="not supported"):
        parse_ollama_chat(body, "m", ModelLimits())


def test_responses_show_what_was_said():
    content = said("responses", {"type": "input_image", "image_url": URL})
    assert input_parts([TEXT, TEXT, *content]) == [
        {"type": "input_text", "text": "What?\nWhat?"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": "What?"},
    ]
    assert input_parts("") == [{"type": "input_text", "text": ""}]
