"""Streams in the store, the same on a file and on a server: who may write, who takes over, what is kept."""

from __future__ import annotations

from serve_app.state.kept.streams import Head, KeyClaim, StreamPart


def head(stream_id: str, account: str = "a") -> Head:
    return Head(stream_id, account, 1.0, 60.0, b"request")


def part(stream_id: str, number: int, epoch: int = 1, **fields) -> StreamPart:
    first = head(stream_id) if number == 1 else None
    return StreamPart(stream_id, epoch, number, number, b"frame %d" % number, b"trail", first, **fields)


def test_parts_are_written_once_and_read_by_their_account(store):
    streams = store.streams
    for _ in range(2):
        assert streams.write("one", [part("s", 1), part("s", 2)], 1.0, 5.0) == set()
    assert streams.shown("a", "s", 0).parts == [b"frame 1", b"frame 2"]
    assert streams.shown("a", "s", 1).parts == [b"frame 2"] and streams.shown("a", "s", 0).status == "running"
    assert streams.shown("b", "s", 0) is None and streams.shown("a", "t", 0) is None
    assert streams.cancel("b", "s") is None and streams.cancel("a", "s") == "cancelling"
    (running,) = streams.beat("one", 5.0, ["s"], 3.0)
    assert (running.epoch, running.seen, running.cancelling) == (1, 3.0, True)


def test_only_one_gateway_has_a_stream(store, open_store):
    streams, elsewhere = store.streams, open_store("elsewhere").streams
    streams.write("one", [part("s", 1)], 1.0, 5.0)
    elsewhere.beat("two", 9.0, (), 4.0)
    elsewhere.beat("three", 9.0, (), 4.0)
    assert elsewhere.orphans(4.0, 9) == [] and elsewhere.take("two", "s", 4.0) is None
    assert elsewhere.orphans(5.0, 9) == ["s"]
    taken = elsewhere.take("two", "s", 5.0)
    assert taken.head == head("s") and taken.epoch == 2 and taken.parts == [(b"frame 1", b"trail")]
    assert streams.take("three", "s", 5.0) is None and streams.orphans(5.0, 9) == []
    # The first one is back, and adds nothing.
    assert streams.write("one", [part("s", 2), part("t", 1)], 6.0, 9.0) == {"s"}
    assert elsewhere.write("two", [part("s", 2, 2, ending="done", expires=70.0)], 6.0, 9.0) == set()
    assert [one.id for one in streams.beat("one", 9.0, (), 6.0)] == ["t"]
    shown = streams.shown("a", "s", 0)
    assert shown.status == "done" and shown.parts == [b"frame 1", b"frame 2"]
    streams.release("one")
    assert elsewhere.orphans(6.0, 9) == ["t"]


def test_a_gateway_that_was_killed_before_its_clock_was_put_back_is_gone(store, open_store):
    """It had said that it lives for an hour to come."""
    one, other = store, open_store("elsewhere")
    one.streams.write("one", [part("s", 1)], 3601.0, 3605.0)
    claim = KeyClaim("one", "a", "k", 3601.0)
    assert one.answers.claim(claim, 3605.0, "print") is None
    assert other.streams.orphans(2.0, 9) == ["s"] and other.streams.take("two", "s", 2.0).epoch == 2
    assert other.answers.claim(KeyClaim("two", "a", "k", 2.0), 6.0, "print") is None
    # One that says it again is none of them.
    one.streams.write("three", [part("t", 1)], 3601.0, 3605.0)
    one.streams.beat("three", 6.0, (), 2.0)
    assert other.streams.orphans(2.0, 9) == []


def test_what_was_refused_is_over_wherever_it_is(store):
    streams = store.streams
    # It comes to the store behind its refusal, is there before, has another gateway, or has come to its end there.
    streams.refuse("one", [head("late")], 2.0)
    assert streams.write("one", [part("late", 1)], 2.0, 5.0) == {"late"}
    streams.write("one", [part("there", 1), part("taken", 1), part("done", 1)], 2.0, 5.0)
    streams.beat("two", 90.0, (), 6.0)
    assert streams.take("two", "taken", 6.0).epoch == streams.take("two", "done", 6.0).epoch == 2
    assert streams.write("two", [part("done", 2, 2, ending="done", expires=70.0)], 6.0, 9.0) == set()
    streams.refuse("one", [head("there"), head("taken"), head("done")], 7.0)
    assert streams.orphans(50.0, 9) == [] and streams.beat("two", 90.0, (), 7.0) == []
    assert streams.write("one", [part("there", 2)], 7.0, 9.0) == {"there"}
    assert streams.write("two", [part("taken", 2, 2)], 7.0, 9.0) == {"taken"}
    for name in ("late", "there", "taken"):
        assert (streams.shown("a", name, 0).status, streams.shown("a", name, 0).parts) == ("expired", [])
    assert streams.shown("a", "done", 0).status == "done" and len(streams.shown("a", "done", 0).parts) == 2


def test_what_a_gateway_says_last_holds_for_what_is_written(store, open_store):
    streams = store.streams
    assert streams.write("one", [part("s", 1), part("t", 1)], 1.0, 5.0, lambda: (20.0, [head("s")])) == set()
    assert streams.shown("a", "s", 0).status == "expired" and streams.shown("a", "s", 0).parts == []
    assert streams.shown("a", "t", 0).status == "running"
    elsewhere = open_store("elsewhere").streams
    assert elsewhere.orphans(9.0, 9) == [] and elsewhere.orphans(20.0, 9) == ["t"]


def test_a_stream_that_ends_its_gateways_is_given_up(store):
    streams = store.streams
    streams.write("0", [part("s", 1)], 1.0, 2.0)
    for n in range(1, 5):
        streams.beat(str(n), 10.0 * n + 1, (), 10.0 * n)
        assert streams.take(str(n), "s", 10.0 * n).epoch == n + 1
    streams.beat("5", 51.0, (), 50.0)
    assert streams.take("5", "s", 50.0) is None and streams.shown("a", "s", 0).status == "lost"


def test_what_expired_or_is_too_much_goes(store):
    streams = store.streams
    streams.max_bytes = 100
    for n, stream_id in enumerate(("old", "new", "running")):
        streams.write("one", [part(stream_id, 1)], 1.0, 5.0)
        if stream_id != "running":
            ended = StreamPart(stream_id, 1, 2, 2, b"x" * 60, b"", None, "done", 50.0 + n)
            streams.write("one", [ended], 1.0, 5.0)
    streams.trim(10.0)
    gone, kept = (
        [name for name in ("old", "new", "running") if streams.shown("a", name, 0).status == "expired"],
        "running",
    )
    assert len(gone) == 1 and kept not in gone and streams.shown("a", gone[0], 0).parts == []
    streams.trim(60.0)
    assert [streams.shown("a", name, 0).status for name in ("old", "new", kept)] == ["expired", "expired", "running"]
    streams.trim(60.0 + 86_400)
    assert streams.shown("a", "old", 0) is None and streams.shown("a", kept, 0).status == "running"


def test_a_key_is_claimed_once_and_freed_by_the_loss_of_its_gateway(store, open_store):
    one, two = store.answers, open_store("elsewhere").answers
    first = KeyClaim("one", "a", "k", 1.0)
    assert one.claim(first, 5.0, "print") is None
    known = two.claim(KeyClaim("two", "a", "k", 2.0), 5.0, "other")
    assert known.print == "print" and known.answer is None
    assert two.claim(KeyClaim("two", "b", "k", 2.0), 5.0, "print") is None
    # Nobody hears of the first any more.
    second = KeyClaim("two", "a", "k", 6.0)
    assert two.claim(second, 9.0, "other") is None
    assert not one.keep(first, b"late") and two.keep(second, b"answer")
    two.free(second)
    assert one.claim(KeyClaim("one", "a", "k", 15.0), 20.0, "other").answer == b"answer"
    third = KeyClaim("one", "a", "k", 90_000.0)
    assert one.claim(third, 99_999.0, "other") is None
    one.free(third)
    fourth = KeyClaim("one", "a", "k", 90_001.0)
    assert one.claim(fourth, 99_999.0, "more") is None
    # An end that comes late is that of its own claim.
    one.free(third)
    assert not one.keep(third, b"late") and one.keep(fourth, b"answer")
