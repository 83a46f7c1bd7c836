"""Requests that begin alike stand together, and nothing else moves."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch.order import BOUNDS, ROW, digests, levels, order, shared


def ordered(prompts: list[bytes], models: list[int] | None = None) -> list[int]:
    rows = levels(b"".join(digests(b"", prompt) for prompt in prompts))
    return order(np.array(models or [0] * len(prompts), np.uint16), rows).tolist()


def test_what_shares_nothing_keeps_its_order():
    rng = random.Random(1)
    assert ordered([rng.randbytes(rng.randrange(4000)) for _ in range(200)]) == list(range(200))
    assert ordered([]) == []


def test_groups_stand_together_where_their_first_came_and_deeper_ones_inside_of_them():
    rng = random.Random(2)
    outer = [rng.randbytes(600) for _ in range(3)]
    inner = {(o, i): outer[o] + rng.randbytes(1500) for o in range(3) for i in range(3)}
    asked = [(rng.randrange(3), rng.randrange(3)) for _ in range(300)]
    found = ordered([inner[key] + rng.randbytes(300) for key in asked])
    assert sorted(found) == list(range(300))
    runs = [key for i, key in enumerate(asked[j] for j in found) if i == 0 or key != asked[found[i - 1]]]
    assert len(runs) == len(set(asked))  # each pair is one run
    outers = [o for i, (o, _) in enumerate(runs) if i == 0 or o != runs[i - 1][0]]
    assert outers == list(dict.fromkeys(o for o, _ in asked))
    for key in set(asked):
        members = [j for j in found if asked[j] == key]
        assert members == sorted(members)


def test_models_come_first_and_heads_before_all_else():
    rng = random.Random(3)
    same = rng.randbytes(400)
    assert ordered([same + b"1" * 100, same + b"2" * 100, same + b"3" * 100, same], [1, 0, 1, 0]) == [0, 2, 1, 3]
    rows = levels(b"".join(digests(head, same) for head in (b"a", b"b", b"a", b"b")))
    assert order(np.zeros(4, np.uint16), rows).tolist() == [0, 2, 1, 3]


def test_what_neighbours_share_is_never_told_too_high():
    rng = random.Random(4)
    head = rng.randbytes(5000)
    prompts = [head[: rng.randrange(100, 5000)] + rng.randbytes(200) for _ in range(300)]
    rows, models = levels(b"".join(digests(b"", p) for p in prompts)), np.zeros(300, np.uint16)
    found = order(models, rows)
    told = shared(found, models, rows)
    assert told[0] == 0 and told.sum() > 0
    for before, at, bytes_ in zip(found, found[1:], told[1:], strict=False):
        assert bytes_ == 0 or bytes_ in BOUNDS
        assert prompts[before][:bytes_] == prompts[at][:bytes_]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([b"", b"x" * 128, b"x" * 200, b"y" * 300])), max_size=30))
def test_it_is_a_stable_permutation(asked):
    prompts, models = [prompt for _, prompt in asked], [model for model, _ in asked]
    found = ordered(prompts, models)
    assert sorted(found) == list(range(len(asked)))
    for key in set(asked):
        places = [found.index(i) for i, one in enumerate(asked) if one == key]
        assert places == sorted(places)
    assert len(digests(b"head", b"z" * 100_000)) == ROW
