"""The index of who holds which prefix: a slow, exact one beside it."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.locality import LocalityIndex

HOLDERS = [f"w{i}" for i in range(4)]


def chain(talk: int, length: int) -> list[bytes]:
    return [sha256(b"%d %d" % (talk, at)).digest() for at in range(length)]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 5), st.integers(1, 30),
                          st.sampled_from(HOLDERS)), max_size=40))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_it_agrees_with_a_dictionary_while_there_is_room(steps: list[tuple[str, int, int, str]]) -> None:
    index, truth = LocalityIndex(10_000), {}
    for kind, talk, length, holder in steps:
        if kind == "add":
            index.add(chain(talk, length), holder)
            truth[talk, holder] = max(length, truth.get((talk, holder), 0))
        else:
            index.remove_holder(holder)
            truth = {key: n for key, n in truth.items() if key[1] != holder}
    for talk in range(6):
        expected = {h: n for (t, h), n in truth.items() if t == talk}
        assert index.match(chain(talk, 30)) == expected


def test_a_match_ends_with_the_prompt_and_with_the_first_unknown_chunk() -> None:
    index = LocalityIndex(1000)
    index.add(chain(1, 10), "a")
    index.add(chain(1, 4), "b")
    assert index.match(chain(1, 6)) == {"a": 6, "b": 4}
    assert index.match([*chain(1, 3), *chain(2, 3)]) == {"a": 3, "b": 3}
    assert index.match(chain(2, 5)) == {}
    index.discard(chain(1, 10)[7:], "a")
    assert index.match(chain(1, 10)) == {"a": 7, "b": 4}


def test_the_oldest_keys_go_and_the_size_in_bytes_never_grows() -> None:
    index = LocalityIndex(2000)
    size = index.nbytes
    kept = chain(0, 20)
    index.add(kept, "a")
    for talk in range(1, 2000):
        index.add(chain(talk, 5), "a")
        if talk % 20 == 0:
            assert index.match(kept) == {"a": 20}  # what is used stays
    assert index.nbytes == size
    assert len(index) <= 2000 / 0.8 + 16
    assert index.match(chain(1, 5)) == {}


def test_four_latest_holders_are_remembered() -> None:
    index = LocalityIndex(100)
    for name in "abcdef":
        index.add(chain(1, 2), name)
    assert set(index.match(chain(1, 2))) == set("cdef")
    index.add(chain(1, 2), "d")
    index.add(chain(1, 2), "g")
    assert set(index.match(chain(1, 2))) == set("defg")


def test_short_keys_and_bad_sizes() -> None:
    index = LocalityIndex(10)
    index.add([b"ab", b"cd"], "a")
    assert index.match([b"ab", b"cd"]) == {"a": 2}
    index.add([], "a")
    assert index.match([]) == {}
    with pytest.raises(ValueError, match="positive"):
        LocalityIndex(0)


@pytest.mark.slow
def test_bytes_per_key() -> None:
    """What docs/architecture.md states."""
    index = LocalityIndex(100_000)
    rng = np.random.default_rng(0)
    keys = [rng.bytes(32) for _ in range(100_000)]
    for at in range(0, len(keys), 50):
        index.add(keys[at : at + 50], "a")
    assert index.nbytes / 100_000 <= 26
    found = sum(len(index.match([key])) for key in keys[::50])
    assert found >= 0.95 * len(keys[::50])


def test_the_newest_of_four_holders_displaces_itself_then_a_gap_then_the_oldest() -> None:
    index, keys = LocalityIndex(100), [sha256(b"x").digest()]
    for name in "abcde":
        index.add(keys, name)
    assert set(index.match(keys)) == set("bcde")
    index.add(keys, "c")
    index.discard(keys, "d")  # leaves a gap before what is older
    index.add(keys, "b")
    assert set(index.match(keys)) == set("bce")
    index.add(keys, "f", "g")
    assert set(index.match(keys)) == set("bcfg")


def test_it_grows_and_knows_what_it_knew() -> None:
    index = LocalityIndex(400)
    for talk in range(200):
        index.add(chain(talk, 5), f"w{talk % 3}", "node:n")
    known = {talk: index.match(chain(talk, 5)) for talk in range(200)}
    assert sum(map(bool, known.values())) >= 50
    index.grow(40_000)
    assert index.capacity == 40_000
    assert {talk: index.match(chain(talk, 5)) for talk in range(200)} == known
    for talk in range(1000, 2000):
        index.add(chain(talk, 5), "w9")
    assert all(index.match(chain(talk, 5)) == {"w9": 5} for talk in range(1000, 2000))
    with pytest.raises(ValueError, match="only grow"):
        index.grow(100)


def test_nothing_is_lost_on_the_way_to_a_larger_index() -> None:
    """It grows by a part with each addition; what is known is found at every moment, and who is older stays known."""
    index = LocalityIndex(40_000)
    for talk in range(3000):
        index.add(chain(talk, 5), f"w{talk % 7}")
    known = {talk: found for talk in range(3000) if (found := index.match(chain(talk, 5)))}
    assert len(known) > 2900
    steps, buckets = [60_000, 250_000, 700_000], set()
    for number in range(80):
        if number % 20 == 0 and steps:
            index.grow(steps.pop(0))
        index.add(chain(10_000 + number, 5), "new")
        buckets.add(index._buckets)
        for talk in range(number, 3000, 97):
            assert index.match(chain(talk, 5)) == known.get(talk, {})
    assert {talk: found for talk in range(3000) if (found := index.match(chain(talk, 5)))} == known
    assert all(index.match(chain(10_000 + number, 5)) == {"new": 5} for number in range(80))
    assert len(buckets) > 40 and index._buckets == int(700_000 / 12.8) + 1
    held = index._prints[index._prints != 0]
    assert (index._rows(held) == np.nonzero(index._prints)[0]).all()


def test_it_goes_on_after_so_many_look_ups_that_stamps_are_full() -> None:
    index = LocalityIndex(16)  # two buckets
    old, new = chain(0, 3), chain(1, 3)
    index.add(old, "w0")
    index._clock = 2**32 - 2
    index.add(new, "w1")
    for _ in range(5):
        assert index.match(new) == {"w1": 3}
    # Who is older is still known: of a full index the old ones go first.
    for talk in range(2, 12):
        index.add(chain(talk, 1), "w2")
        index.match(new)
    assert index.match(new) == {"w1": 3}
    for talk in range(12, 60):
        index.add(chain(talk, 1), "w2")
        index.match(new)
    assert index.match(old) == {} and index.match(new) == {"w1": 3}


def test_whoever_is_gone_is_found_no_more_and_its_number_is_free_once_no_key_has_it() -> None:
    index = LocalityIndex(100_000)  # 7,813 buckets: a sweep takes eight additions
    for talk in range(50):
        index.add(chain(talk, 10), "stays", f"w{talk}")
    for talk in range(50):
        index.remove_holder(f"w{talk}")
    assert index.match(chain(7, 10)) == {"stays": 10}
    index.remove_holder("stays")
    assert not index.held(chain(7, 10)).any() and not index.match(chain(7, 10))
    for talk in range(8):
        index.add(chain(100 + talk, 1), f"new{talk}")
    assert len(index._free) == 50 and np.count_nonzero(index._holders) == 8
    index.add(chain(200, 1), "newest")
    assert len(index._free) == 49 and len(index._names) == 59
    # What goes while another is taken out, or while the index grows, has its own sweep.
    index.remove_holder("new0")
    index.add(chain(201, 1), "newest")
    index.remove_holder("new1")
    index.grow(200_000)
    for _ in range(40):
        index.add(chain(201, 1), "newest")
    assert len(index._free) == 51 and np.count_nonzero(index._holders) == 8
    assert index.held([chain(100 + talk, 1)[0] for talk in range(4)]).tolist() == [False, False, True, True]
