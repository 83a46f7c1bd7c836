"""Detokenising, stop strings and the output stream: whatever way the tokens are cut, the text is the same."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.types import ChoiceDone, GenerateRequest, ReasoningDelta, TextDelta, ToolCallDelta
from serve_app.sampling_params import SamplingParams, TokenLogprobs
from serve_app.text.harmony import HarmonySplitter
from serve_app.text.output import OutputStream, open_output
from serve_app.text.reasoning import MARKS, ReasoningSplitter
from serve_app.text.stop import StopMatcher
from serve_app.text.tool_calls import PARSERS

words = st.text(st.sampled_from("ab <é😀日\n") | st.characters(exclude_categories=["Cs"]), max_size=60)


def cut(items, sizes):
    """``items`` in consecutive slices of the given sizes, the rest in one."""
    at = 0
    for size in sizes:
        yield items[at : at + size]
        at += size
    yield items[at:]


def first_stop(text: str, stops: list[str]) -> str:
    """The slow truth: character by character, the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    sizes=st.lists(st.integers(0, 4), max_size=12),
)
def test_stop_strings_do_not_depend_on_how_text_arrives(text, stops, sizes):
    matcher = StopMatcher(stops)
    shown = ""
    for piece in cut(text, sizes):
        shown += matcher.feed(piece)
        # What is shown can never be taken back.
        assert first_stop(text, stops).startswith(shown)
    if matcher.matched is None:
        shown += matcher.finish()
    assert shown == first_stop(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["\nUser:"])
    assert matcher.feed("Hello\n") == "Hello"
    assert matcher.feed("Us") == ""
    assert matcher.feed("eful") == "\nUseful"
    assert matcher.feed("\nUser: x") == "" and matcher.matched == "\nUser:"


@settings(max_examples=100, deadline=None)
@given(text=words, sizes=st.lists(st.integers(0, 4), max_size=20), stop=st.text("ab ", min_size=1, max_size=3))
def test_the_stream_gives_the_same_text_and_tokens_for_any_steps(tokenizers, text, sizes, stop):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    stream = OutputStream(tokenizer, index=2, stop=[stop])
    events = []
    for step in cut(ids, sizes):
        events += stream.feed(step, [TokenLogprobs(-0.5, []) for _ in step])
    assert stream.done == (stop in tokenizer.decode(ids))
    events += stream.finish("length")
    assert stream.done and stream.feed([1]) == [] and stream.finish() == []
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == first_stop(tokenizer.decode(ids), [stop])
    assert events[-1] == (ChoiceDone(2, "stop", stop) if stop in tokenizer.decode(ids) else ChoiceDone(2, "length"))
    given_ids = [i for delta in deltas for i in delta.token_ids]
    assert given_ids == ids[: len(given_ids)]
    logprobs = [item for delta in deltas for item in delta.logprobs or ()]
    assert [item.token_id for item in logprobs] == given_ids
    if stop not in tokenizer.decode(ids):
        assert given_ids == ids


def test_tokens_beyond_a_stop_string_are_not_told(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("one STOP two", add_special_tokens=False).tolist()
    stream = OutputStream(tokenizer, stop=["STOP"])
    events = stream.feed(ids, [TokenLogprobs(-1.0, [(5, -0.1)]) for _ in ids])
    assert stream.done
    tokens = [item.token for event in events if isinstance(event, TextDelta) for item in event.logprobs or ()]
    assert "".join(tokens).startswith("one") and "two" not in "".join(tokens)


def test_tool_calls_come_in_parts_and_change_the_finish_reason(tokenizers):
    for name in ("byte_level", "pico"):
        tokenizer = tokenizers[name]
        text = 'Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        stream = OutputStream(tokenizer, tools=PARSERS["hermes"](()))
        events = []
        for i in tokenizer.encode(text, add_special_tokens=False):
            events += stream.feed([int(i)])
        events += stream.finish("stop")
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Sure."
        calls = [event for event in events if isinstance(event, ToolCallDelta)]
        assert (calls[0].call_index, calls[0].name, calls[-1].last) == (0, "add", True) and len(calls) > 1
        assert json.loads("".join(call.arguments for call in calls)) == {"a": 1}
        assert events[-1] == ChoiceDone(0, "tool_calls")


def test_a_marker_that_is_a_control_token_reaches_the_parser(tokenizers, tmp_path, folders):
    from serve_app.text.tokenizer import Tokenizer

    spec = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["special"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_prompt('<tool_call>{"name": "f"}</tool_call><|im_end|>')
    assert int(ids[0]) in tokenizer.special_ids
    events = OutputStream(tokenizer, tools=PARSERS["hermes"](())).feed(ids.tolist())
    assert [event.name for event in events if isinstance(event, ToolCallDelta)] == ["f"]
    plain = OutputStream(tokenizer)
    assert "".join(event.text for event in plain.feed(ids.tolist())) == '{"name": "f"}'


def test_reasoning_is_told_apart_and_counted(tokenizers):
    for name in ("byte_level", "pico"):
        tokenizer = tokenizers[name]
        thought = tokenizer.encode("<think>\nLet me see.\n</think>\n\n", add_special_tokens=False).tolist()
        answer = tokenizer.encode("Four.", add_special_tokens=False).tolist()
        for step in (1, 3, 100):
            stream = OutputStream(tokenizer, reasoning=ReasoningSplitter(MARKS["qwen3"]))
            ids = thought + answer
            logprobs = [TokenLogprobs(-1.0, []) for _ in ids]
            events = []
            for at in range(0, len(ids), step):
                events += stream.feed(ids[at : at + step], logprobs[at : at + step])
            events += stream.finish()
            assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "Let me see."
            said = [e for e in events if isinstance(e, TextDelta)]
            assert "".join(e.text for e in said) == "Four."
            assert [i for e in said for i in e.token_ids] == answer
            assert sum(len(e.logprobs or ()) for e in said) == len(answer)
            assert stream.reasoning_tokens == len(thought)


def test_a_call_of_harmony_comes_behind_reasoning(tokenizers):
    tokenizer = tokenizers["pico"]
    text = (
        "<|channel|>analysis<|message|>Let me add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    for step in (1, 4, 100):
        stream = OutputStream(tokenizer, tools=PARSERS["harmony"](()), reasoning=HarmonySplitter(["f", "add"]))
        events = [e for at in range(0, len(ids), step) for e in stream.feed(ids[at : at + step])] + stream.finish()
        assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "Let me add."
        assert not "".join(e.text for e in events if isinstance(e, TextDelta))
        calls = [e for e in events if isinstance(e, ToolCallDelta)]
        assert calls[0].name == "add" and json.loads("".join(call.arguments for call in calls)) == {"a": 1}
        assert events[-1] == ChoiceDone(0, "tool_calls")


def test_calls_come_out_of_reasoning(tokenizers):
    """As GLM and DeepSeek begin them now and then, while prose about the marks stays reasoning."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    request = GenerateRequest("m", [], None, False, SamplingParams(), tools=[tool])
    written = {
        "glm": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "deepseek": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    }
    tokenizer = tokenizers["pico"]
    prompt = tokenizer.encode_prompt("<|im_start|>assistant\n<think>\n")
    for family, call in written.items():
        for between in ("", "</think>\n\n"):
            thought = "A <tool_call> or <｜DSML｜ it is."
            ids = tokenizer.encode(f"{thought}\n{between}{call}", add_special_tokens=False).tolist()
            for step in (1, 5, 200):
                stream = open_output(tokenizer, request, prompt, tool_parser=family, reasoning_parser="deepseek_r1")
                events = [e for at in range(0, len(ids), step) for e in stream.feed(ids[at : at + step])]
                events += stream.finish()
                assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == thought
                assert not "".join(e.text for e in events if isinstance(e, TextDelta))
                calls = [e for e in events if isinstance(e, ToolCallDelta)]
                assert calls[0].name == "add" and json.loads("".join(c.arguments for c in calls)) == {"a": 1}
                assert events[-1] == ChoiceDone(0, "tool_calls")


def test_stop_strings_are_for_the_answer(tokenizers):
    tokenizer = tokenizers["pico"]
    ids = tokenizer.encode("<think>one\n\nEND</think>\nFour END five", add_special_tokens=False).tolist()
    for step in (1, 4, 100):
        stream = OutputStream(tokenizer, stop=["END", "\n\n"], reasoning=ReasoningSplitter(MARKS["qwen3"]))
        events = [e for at in range(0, len(ids), step) for e in stream.feed(ids[at : at + step])]
        assert stream.done and events[-1] == ChoiceDone(0, "stop", "END")
        assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == "one\n\nEND"
        said = [e for e in events if isinstance(e, TextDelta)]
        assert "".join(e.text for e in said) == "Four "
        # The token in which the stop string begins was shown in part.
        assert tokenizer.decode([i for e in said for i in e.token_ids]).strip() in ("Four", "Four E")


def test_the_request_and_its_prompt_open_the_stream(tokenizers):
    tokenizer = tokenizers["pico"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    request = GenerateRequest("m", [], None, False, SamplingParams(), tools=[tool], parallel_tool_calls=False)
    prompt = tokenizer.encode_prompt("<|im_start|>assistant\n<think>\n")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = tokenizer.encode(f"Hm.</think>\n{call}{call}", add_special_tokens=False).tolist()
    stream = open_output(tokenizer, request, prompt, tool_parser="hermes", reasoning_parser="qwen3")
    events = stream.feed(ids)
    assert [type(e).__name__ for e in events] == ["ReasoningDelta", "ToolCallDelta", "ChoiceDone"]
    assert stream.done and events[-1] == ChoiceDone(0, "tool_calls")
    request.tool_choice = "none"
    events = open_output(tokenizer, request, prompt[:-2], tool_parser="hermes", reasoning_parser="qwen3").feed(ids)
    assert "".join(e.text for e in events) == f"Hm.</think>\n{call}{call}"
