"""Detokenising, stop strings and the output stream: whatever way the tokens are cut, the text is the same."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.types import ChoiceDone, TextDelta, ToolCallDelta
from serve_app.engine.request import TokenLogprobs
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.output import OutputStream
from serve_app.text.stop import StopMatcher

words = st.text(st.sampled_from("ab <é😀日\n") | st.characters(exclude_categories=["Cs"]), max_size=60)


def cut(items, sizes):
    """``items`` in consecutive slices of the given sizes, the rest in one."""
    at = 0
    for size in sizes:
        yield items[at : at + size]
        at += size
    yield items[at:]


@settings(max_examples=100, deadline=None)
@given(text=words)
def test_deltas_join_to_the_whole_decoding(tokenizers, text):
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        stream = Detokenizer(tokenizer)
        deltas = [stream.feed(i) for i in ids]
        assert not any("\ufffd" in delta for delta in deltas) or "\ufffd" in text
        assert "".join(deltas) + stream.finish() == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_deltas_of_any_ids_join_to_the_whole_decoding(tokenizers, data):
    # Byte-level vocabularies can spell broken UTF-8 with any ids; control tokens are in between.
    for name in ("byte_level", "pico"):
        tokenizer = tokenizers[name]
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        stream = Detokenizer(tokenizer)
        assert "".join(stream.feed(i) for i in ids) + stream.finish() == tokenizer.decode(ids)


def test_a_character_is_never_split(tokenizers):
    stream = Detokenizer(tokenizers["byte_level"])
    ids = tokenizers["byte_level"].encode("a😀b", add_special_tokens=False).tolist()
    assert len(ids) > 3
    assert [delta for i in ids if (delta := stream.feed(i))] == ["a", "😀", "b"]


def first_stop(text: str, stops: list[str]) -> str:
    """The slow truth: character by character, the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=400, deadline=None)
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


def test_tool_calls_come_whole_and_change_the_finish_reason(tokenizers):
    for name in ("byte_level", "pico"):
        tokenizer = tokenizers[name]
        text = 'Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        stream = OutputStream(tokenizer, tool_parser="hermes")
        events = []
        for i in tokenizer.encode(text, add_special_tokens=False):
            events += stream.feed([int(i)])
        events += stream.finish("stop")
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Sure."
        calls = [event for event in events if isinstance(event, ToolCallDelta)]
        assert [(call.call_index, call.name, json.loads(call.arguments)) for call in calls] == [(0, "add", {"a": 1})]
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
    events = OutputStream(tokenizer, tool_parser="hermes").feed(ids.tolist())
    assert [event.name for event in events if isinstance(event, ToolCallDelta)] == ["f"]
    plain = OutputStream(tokenizer)
    assert "".join(event.text for event in plain.feed(ids.tolist())) == '{"name": "f"}'
