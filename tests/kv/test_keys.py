from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.kv.keys import BLOCK_TOKENS, all_over, block_keys, root_key, tail_key, weights_key

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200)
FIELDS = st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
ROOT = root_key(weights_key("rev", "bfloat16", "layout"), "", b"salt")


@given(FIELDS, FIELDS, st.binary(min_size=1, max_size=5), st.binary(min_size=1, max_size=5))
def test_roots_are_equal_only_for_equal_fields(a, b, salt_a, salt_b):
    roots = [root_key(weights_key(*fields[:3]), fields[3], salt) for fields, salt in ((a, salt_a), (b, salt_b))]
    assert (roots[0] == roots[1]) == ((a, salt_a) == (b, salt_b))


def test_fields_of_a_root_do_not_run_into_each_other():
    assert weights_key("ab", "c", "") != weights_key("a", "bc", "")
    assert root_key(b"ab", "c", b"s") != root_key(b"a", "bc", b"s")


def test_an_empty_salt_is_refused():
    with pytest.raises(ValueError, match="salt"):
        root_key(b"weights", "", b"")


@given(TOKENS, TOKENS)
def test_keys_agree_exactly_on_the_common_prefix(a, b):
    keys_a, keys_b = block_keys(ROOT, np.array(a, np.int32)), block_keys(ROOT, np.array(b, np.int32))
    assert len(keys_a) == len(a) // BLOCK_TOKENS
    for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)):
        same = a[: (i + 1) * BLOCK_TOKENS] == b[: (i + 1) * BLOCK_TOKENS]
        assert (x == y) == same


@given(TOKENS, st.integers(0, 8))
def test_a_chain_can_be_extended(tokens, split):
    whole = block_keys(ROOT, tokens)
    assert block_keys(ROOT, np.array(tokens, np.int32), known=whole[:split]) == whole


def test_more_known_keys_than_blocks_are_cut():
    whole = block_keys(ROOT, list(range(96)))
    assert block_keys(ROOT, list(range(64)), known=whole) == whole[:2]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=31), st.lists(st.integers(0, 9), min_size=1, max_size=31))
def test_tails_differ_by_tokens_and_parent(a, b):
    assert (tail_key(ROOT, a) == tail_key(ROOT, b)) == (a == b)
    assert tail_key(ROOT, a) != tail_key(block_keys(ROOT, list(range(32)))[0], a)


@pytest.mark.parametrize("count", [0, 32, 33])
def test_a_tail_is_shorter_than_a_block(count):
    with pytest.raises(ValueError, match="tail"):
        tail_key(ROOT, list(range(count)))


@pytest.mark.parametrize("bad", [[2**31] * 32, np.array([2**32 + 1] * 32), [-(2**31) - 1] * 32])
def test_token_ids_never_wrap(bad):
    with pytest.raises(ValueError, match="int32"):
        block_keys(ROOT, bad)


def test_token_ids_are_integers():
    with pytest.raises(TypeError):
        block_keys(ROOT, np.zeros(32))


def test_placeholders_are_told_apart_by_their_content():
    tokens = [7] * 100
    plain = block_keys(ROOT, tokens)
    one, other = (block_keys(ROOT, tokens, media=[(40, 60, digest)]) for digest in (b"one", b"other"))
    assert one[0] == other[0] == plain[0]  # the span begins in the second block
    assert len({one[1], other[1], plain[1]}) == len({one[2], other[2], plain[2]}) == 3
    assert block_keys(ROOT, tokens, media=[(41, 61, b"one")])[1] != one[1]
    assert block_keys(ROOT, tokens, media=[(40, 60, b"one"), (97, 100, b"two")]) == one
    # Computed in parts, and long spans.
    assert block_keys(ROOT, tokens, known=one[:1], media=[(40, 60, b"one")]) == one
    long = block_keys(ROOT, [7] * 128, media=[(3, 128, b"long")])
    assert len(set(long) | set(block_keys(ROOT, [7] * 128))) == 8
    tails = {
        tail_key(one[2], tokens[96:], media=media, start=96) for media in ([], [(97, 100, b"a")], [(97, 100, b"b")])
    }
    assert len(tails) == 3 and tail_key(one[2], tokens[96:]) in tails
    assert tail_key(one[2], tokens[96:], media=[(40, 60, b"one")], start=96) == tail_key(one[2], tokens[96:])


def test_files_that_all_of_a_prompt_depends_on_are_named_from_its_beginning():
    tokens, spans = [7] * 100, [(70, 71, b"one"), (80, 81, b"two")]
    plain = block_keys(ROOT, tokens, media=spans)
    one, same, other = (
        block_keys(ROOT, tokens, media=[*all_over(digests), *spans])
        for digests in ([b"one", b"two"], [b"one", b"two"], [b"onetw", b"o"])
    )
    assert one == same and len({one[0], other[0], plain[0]}) == 3
    short = [tail_key(ROOT, tokens[:9], media=media) for media in ([], all_over([b"one"]), all_over([b"two"]))]
    assert len(set(short)) == 3
