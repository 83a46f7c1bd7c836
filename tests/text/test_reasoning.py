"""Reasoning told apart from the answer, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.harmony import HarmonySplitter
from serve_app.text.reasoning import MARKS, ReasoningSplitter, opens

CASES = [
    ("qwen3", False, "<think>\nLet me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    ("qwen3", False, "<think>\n\n</think>\n\nFour.", "", "Four."),
    ("qwen3", False, "Four. <think>no</think>", "", "Four. <think>no</think>"),
    ("qwen3", False, "<thin ice>", "", "<thin ice>"),
    ("qwen3", False, "  \n Four", "", "  \n Four"),
    ("qwen3", False, "<think>cut </thin", "cut </thin", ""),
    ("qwen3", False, "<think>a < b </b>\n c</think>d", "a < b </b>\n c", "d"),
    ("deepseek_r1", True, "Hm.\n</think>\nYes", "Hm.", "Yes"),
    ("deepseek_r1", True, "Hm.", "Hm.", ""),
    ("deepseek_r1", False, "<think>Hm.</think>", "Hm.", ""),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes", "Hm.", "Yes"),
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        "Hm.",
        "Yes",
    ),
    ("harmony", False, "<|channel|>final<|message|>Yes <|end", "", "Yes <|end"),
    ("harmony", False, "<|channel|>analysis<|message|>Hm.<|end|>", "Hm.", ""),
    ("harmony", False, "Four.", "", "Four."),
    ("harmony", False, "<|channel|>final <|constrain|>JSON<|message|>{}", "", "{}"),
    ("harmony", False, "<|channel|>final JSON<|message|>{}", "", "{}"),
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>Or?<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant<|channel|>final JSON"
        "<|message|>{}",
        "Hm.\nOr?\nLet me.",
        "{}",
    ),
]


def split(name: str, inside: bool, pieces: list[str]) -> tuple[str, str, int | None]:
    splitter = HarmonySplitter() if name == "harmony" else ReasoningSplitter(MARKS[name], inside=inside)
    told = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", final=True)]
    return "".join(t for t, _ in told), "".join(a for _, a in told), splitter.ended_at


@pytest.mark.parametrize(("name", "inside", "text", "reasoning", "answer"), CASES)
def test_families(name, inside, text, reasoning, answer):
    for pieces in ([text], list(text), [text[:9], text[9:]]):
        found = split(name, inside, pieces)
        assert found[:2] == (reasoning, answer)
        if answer:
            assert text[found[2] :] == answer


@settings(max_examples=300, deadline=None)
@given(data=st.data(), inside=st.booleans())
def test_the_same_whatever_way_it_is_cut(data, inside):
    bits = st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a"])
    text = "".join(data.draw(st.lists(bits, max_size=9)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split("qwen3", inside, pieces) == split("qwen3", inside, [text])


TO = "to=functions.f"
CALLS = [
    (f"<|channel|>commentary {TO} <|constrain|>json<|message|>{{}}<|call|>", "", 0),
    (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary {TO}<|message|>{{}}", "Hm.", 33),
    (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant {TO}<|channel|>commentary<|message|>{{}}", "Hm.", 33),
    (f" {TO}<|channel|>commentary json<|message|>{{}}", "", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "at"), CALLS)
def test_a_message_to_a_function_ends_reasoning_where_there_are_tools(text, reasoning, at):
    """And comes out whole, with its header, for the parser of calls."""
    for pieces in ([text], list(text), [text[:20], text[20:]]):
        splitter = HarmonySplitter(["f", "add"])
        told = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", final=True)]
        assert "".join(t for t, _ in told) == reasoning
        assert "".join(a for _, a in told) == text[splitter.ended_at :] and TO in text[splitter.ended_at :]
        assert splitter.ended_at == at
        assert TO not in "".join(t for t, _ in told)
    if not text.startswith(" "):
        assert split("harmony", False, [text])[1] == ""
        other = HarmonySplitter(["g"])
        assert TO not in "".join("".join(each) for each in (other.feed(text), other.feed("", final=True)))


def test_a_mark_that_is_only_named_ends_no_reasoning():
    text = "I write <tool_call>, or <tool_call> get it. <tool_call>\nget_weather</tool_call> is how. </think>Hi"
    for heads, ends in ((("get_weather", "now"), "<tool_call>\n"), (("now",), "</think>"), (("",), "<tool_call>, or")):
        thought = text[: text.index(ends)].rstrip()
        for pieces in ([text], list(text), [text[:60], text[60:]]):
            splitter = ReasoningSplitter(MARKS["deepseek_r1"], inside=True, call="<tool_call>", heads=heads)
            told = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", final=True)]
            said, answer = ("".join(each) for each in zip(*told, strict=True))
            assert said == thought and answer == text[splitter.ended_at :]
            assert answer == "Hi" if heads == ("now",) else answer.startswith("<tool_call>")
    # Cut where it could still become a call.
    splitter = ReasoningSplitter(MARKS["deepseek_r1"], inside=True, call="<tool_call>", heads=("now",))
    assert splitter.feed("Hm <tool_call> no") == ("Hm", "") and splitter.feed("", final=True) == (" <tool_call> no", "")


def test_a_call_ends_reasoning_where_the_model_begins_it_there():
    text = "Let me see. <|call|>f"
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(MARKS["deepseek_r1"], inside=True, call="<|call|>")
        told = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", final=True)]
        assert ["".join(each) for each in zip(*told, strict=True)] == ["Let me see.", "<|call|>f"]
        assert text[splitter.ended_at :] == "<|call|>f"


def test_reasoning_streams_on():
    splitter = ReasoningSplitter(MARKS["qwen3"])
    assert splitter.feed("<think>Let ") == ("Let", "")
    assert splitter.feed("me</thi") == (" me", "")
    assert splitter.feed("nk>\n") == ("", "")
    assert splitter.feed("\nYes") == ("", "Yes")
    assert splitter.feed(" it ") == ("", " it ")


def test_the_prompt_tells_where_the_answer_begins():
    assert opens("<|im_start|>assistant\n<think>\n", MARKS["qwen3"])
    assert not opens("<think>\n\n</think>\n\n", MARKS["qwen3"])
