"""Masks as bits, computed beside the forward pass."""

from __future__ import annotations

import threading

import numpy as np

from serve_app.engine.constrain import Masks
from serve_app.engine.step import Scheduled
from tests.engine.fake import request


def masks(rows: int, words: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-(2**31), 2**31, (rows, words), dtype=np.int64).astype(np.int32)


def test_masks_that_had_no_turn_beside_the_forward_pass_are_computed_when_they_are_wanted():
    has_turn, let_go, threads = threading.Event(), threading.Event(), []

    class Grammars:
        def matcher(self, grammar, output=()):
            raise NotImplementedError

        def fill(self, wanted, rows):
            threads.append(threading.current_thread())
            return masks(rows, 4)

    masker, item = Masks(Grammars()), Scheduled(request("x", [1, 2]), 0, 2, 1)
    item.request.constraint = object()
    before = masker.begin([item])
    assert before.mask().rows == [0]
    # The thread is busy with something that no mask waits for.
    masker._thread.submit(lambda: (has_turn.set(), let_go.wait(60)))
    assert has_turn.wait(60)
    threads.clear()
    assert np.array_equal(masker.begin([item]).mask().bits, masks(1, 4))
    assert threads == [threading.main_thread()] and not let_go.is_set()
    let_go.set()
