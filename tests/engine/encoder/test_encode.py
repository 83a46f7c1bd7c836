"""The batcher as its callers see it. The encoder is arithmetic, so every row has a known right answer."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import (
    EncodeBatch,
    EncodeError,
    EncodeFailed,
    EncoderClosed,
    Readout,
    SequenceTooLong,
)

WAIT = 30


class SumEncoder:
    """Row = [sum of ids, sum of type ids, length]; ``gate`` holds a forward pass back until it is set."""

    max_length, vocab_size, type_vocab_size, dimensions = 64, 1000, 2, 3
    readout = Readout(normalise=False)

    def __init__(self, gated: bool = False) -> None:
        self.seen: list[EncodeBatch] = []
        self.started = threading.Event()
        self.gate = threading.Event()
        if not gated:
            self.gate.set()
        self.error: BaseException | None = None

    def forward(self, batch: EncodeBatch) -> np.ndarray:
        self.seen.append(batch)
        self.started.set()
        assert self.gate.wait(WAIT)
        if self.error is not None:
            raise self.error
        parts = np.cumsum(batch.lengths)[:-1]
        ids, kinds = np.split(batch.ids, parts), np.split(batch.type_ids, parts)
        return np.array([[a.sum(), b.sum(), len(a)] for a, b in zip(ids, kinds, strict=True)], np.float32)

    def padded_tokens(self, lengths: np.ndarray) -> int:
        return int(lengths.max() * len(lengths))


def texts(seed: int, count: int, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, n).astype(np.int32) for n in rng.integers(1, longest + 1, count)]


def expected(sequences: list[np.ndarray]) -> np.ndarray:
    return np.array([[s.sum(), 0, len(s)] for s in sequences], np.float32)


@pytest.fixture
def encoder():
    return SumEncoder()


@pytest.fixture
def batcher(encoder):
    batcher = EncodeBatcher(encoder, token_budget=100)
    yield batcher
    encoder.gate.set()
    batcher.close()


def held(encoder: SumEncoder, batcher: EncodeBatcher) -> None:
    """Occupies the batcher's thread with one sequence, so that what follows is queued."""
    encoder.gate.clear()
    encoder.started.clear()
    batcher.submit(texts(99, 1))
    assert encoder.started.wait(WAIT)


def test_rows_come_back_in_the_callers_order(batcher):
    calls = [texts(seed, 1 + 7 * seed) for seed in range(12)]
    futures = [batcher.submit(call) for call in calls]
    for call, future in zip(calls, futures, strict=True):
        np.testing.assert_array_equal(future.result(WAIT), expected(call))


def test_batches_keep_to_the_token_budget_and_are_sorted_by_length(encoder, batcher):
    batcher.submit(texts(0, 200)).result(WAIT)
    assert len(encoder.seen) > 1
    for batch in encoder.seen:
        assert len(batch.ids) == batch.lengths.sum() <= 100
        assert (np.diff(batch.lengths) >= 0).all()


def test_a_sequence_longer_than_the_budget_runs_alone(encoder):
    batcher = EncodeBatcher(encoder, token_budget=10)
    sequences = [np.full(n, 2, np.int32) for n in (64, 3, 50)]
    np.testing.assert_array_equal(batcher.submit(sequences).result(WAIT), expected(sequences))
    assert [len(b.ids) for b in encoder.seen] == [3, 50, 64]
    batcher.close()


def test_a_small_call_behind_a_huge_one_is_in_the_next_batch(encoder, batcher):
    held(encoder, batcher)
    huge = batcher.submit(texts(1, 3000))
    small = batcher.submit([np.array([7], np.int32)])
    encoder.gate.set()
    assert small.result(WAIT)[0, 0] == 7
    huge.result(WAIT)
    first = encoder.seen[1]
    assert any(len(s) == 1 and s[0] == 7 for s in np.split(first.ids, np.cumsum(first.lengths)[:-1]))


def test_batch_calls_take_what_others_leave(encoder, batcher):
    held(encoder, batcher)
    batch = batcher.submit([np.full(10, n, np.int32) for n in range(40)], batch=True)
    others = [batcher.submit([np.full(10, 900, np.int32)] * 30) for _ in range(4)]
    assert batcher.stats().queued_sequences == 160
    encoder.gate.set()
    rows = batch.result(WAIT)
    assert [row[0] for row in rows] == [10.0 * n for n in range(40)] and all(
        o.result(WAIT).shape == (30, 3) for o in others
    )
    shared = [b for b in encoder.seen[1:] if (b.ids == 900).any()]
    riding = sum(int((b.ids != 900).sum()) for b in shared)
    # 5 % of the tokens of others, which have whole steps beside that.
    assert riding == 60 and sum(int((b.ids == 900).sum()) for b in shared) == 1200 and len(shared) == 12
    # Others came a moment ago: the steps of batch calls alone are short.
    assert max(len(b.ids) for b in encoder.seen[13:]) <= 25
    batcher._seen = -1e9
    encoder.seen.clear()
    batcher.submit([np.full(10, 1, np.int32)] * 40, batch=True).result(WAIT)
    assert max(len(b.ids) for b in encoder.seen) == 100


def test_a_batch_call_that_is_cancelled_or_fails_frees_its_queue(encoder, batcher):
    held(encoder, batcher)
    call = batcher.submit(texts(0, 20), batch=True)
    assert call.cancel()
    encoder.gate.set()
    assert batcher.submit(texts(1, 2)).result(WAIT).shape == (2, 3)
    encoder.error = RuntimeError("boom")
    with pytest.raises(EncodeFailed, match="boom"):
        batcher.submit(texts(1, 2), batch=True).result(WAIT)
    encoder.error = None
    assert batcher.submit(texts(1, 2), batch=True).result(WAIT).shape == (2, 3)


def test_more_callers_than_a_batch_holds_are_served_in_order_of_arrival(encoder, batcher):
    held(encoder, batcher)
    order: list[int] = []
    futures = [batcher.submit([np.full(30, i, np.int32)]) for i in range(20)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: order.append(i))
    encoder.gate.set()
    for future in futures:
        future.result(WAIT)
    assert order == list(range(20))


def test_cancelling_frees_the_queue_and_leaves_others_alone(encoder, batcher):
    held(encoder, batcher)
    dropped, kept = batcher.submit([np.full(9, 500, np.int32)] * 50), batcher.submit(texts(3, 5))
    assert batcher.stats().queued_sequences == 55
    assert dropped.cancel()
    assert batcher.stats().queued_sequences == 5
    encoder.gate.set()
    np.testing.assert_array_equal(kept.result(WAIT), expected(texts(3, 5)))
    with pytest.raises(CancelledError):
        dropped.result(WAIT)
    assert not any((batch.ids == 500).sum() >= 9 for batch in encoder.seen)
    assert batcher.stats().cancelled_calls == 1


def test_cancelling_while_its_batch_runs_harms_nobody(encoder, batcher):
    encoder.gate.clear()
    running = batcher.submit(texts(4, 2, longest=8))
    assert encoder.started.wait(WAIT)
    assert running.cancel()
    encoder.gate.set()
    np.testing.assert_array_equal(batcher.submit(texts(5, 2)).result(WAIT), expected(texts(5, 2)))
    assert batcher.stats().cancelled_calls == 1


def test_over_long_input_names_the_text_and_the_limit(batcher):
    with pytest.raises(SequenceTooLong) as caught:
        batcher.submit([np.ones(64, np.int32), np.ones(65, np.int32)])
    assert (caught.value.index, caught.value.length, caught.value.limit) == (1, 65, 64)


@pytest.mark.parametrize(
    "sequence",
    [np.ones(3, np.int64), np.zeros((2, 2), np.int32), np.zeros(0, np.int32), np.array([-1], np.int32)]
    + [np.array([1000], np.int32)],
)
def test_unusable_ids_are_refused_before_the_queue(batcher, sequence):
    with pytest.raises(EncodeError):
        batcher.submit([sequence])
    assert batcher.stats().calls == 0


def test_type_ids_travel_with_their_tokens(batcher):
    sequences = texts(6, 30)
    kinds = [np.arange(len(s), dtype=np.int32) % 2 for s in sequences]
    rows = batcher.submit(sequences, type_ids=kinds).result(WAIT)
    assert rows[:, 1].tolist() == [k.sum() for k in kinds]
    with pytest.raises(EncodeError):
        batcher.submit(sequences, type_ids=kinds[:-1])
    with pytest.raises(EncodeError):
        batcher.submit([np.ones(3, np.int32)], type_ids=[np.ones(2, np.int32)])


def test_a_readout_that_the_model_lacks_is_refused(batcher):
    with pytest.raises(EncodeError):
        batcher.submit(texts(0, 1), Readout(pooling="score"))
    with pytest.raises(EncodeError):
        batcher.submit(texts(0, 1), Readout(dimensions=4))


def test_no_sequences_give_no_rows(batcher):
    assert batcher.submit([]).result(WAIT).shape == (0, 3)


def test_normalise_and_dimensions(batcher):
    rows = batcher.submit(texts(8, 9), Readout(dimensions=2)).result(WAIT)
    assert rows.shape == (9, 2) and rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)


def test_scores_are_finite_sigmoids_or_logits():
    logits = np.array([[-1000.0], [-2.0], [0.0], [3.0], [1000.0]], np.float32)
    np.testing.assert_array_equal(Readout(pooling="score", sigmoid=False).finish(logits), logits[:, 0])
    scores = Readout(pooling="score").finish(logits)
    np.testing.assert_allclose(scores[1:4], 1 / (1 + np.exp(-logits[1:4, 0])), rtol=1e-6)
    assert scores[0] == 0 and scores[4] == 1 and scores.dtype == np.float32


def test_a_failing_forward_fails_its_calls_with_the_cause_and_work_goes_on(encoder, batcher):
    encoder.error = RuntimeError("out of memory")
    with pytest.raises(EncodeFailed) as caught:
        batcher.submit(texts(0, 50)).result(WAIT)
    assert caught.value.__cause__ is encoder.error
    encoder.error = None
    np.testing.assert_array_equal(batcher.submit(texts(1, 5)).result(WAIT), expected(texts(1, 5)))


def test_a_dying_thread_fails_everybody(encoder, batcher):
    held(encoder, batcher)
    waiting = batcher.submit(texts(1, 3))
    encoder.error = SystemExit("worker is going down")
    encoder.gate.set()
    with pytest.raises(EncoderClosed) as caught:
        waiting.result(WAIT)
    assert caught.value.__cause__ is encoder.error
    with pytest.raises(EncoderClosed):
        batcher.submit(texts(1, 1))


def test_close_fails_what_waits_with_the_cause(encoder, batcher):
    held(encoder, batcher)
    waiting = batcher.submit(texts(1, 3))
    closer = threading.Thread(target=batcher.close, args=(RuntimeError("node is draining"),))
    closer.start()
    encoder.gate.set()
    closer.join(WAIT)
    with pytest.raises(EncoderClosed) as caught:
        waiting.result(WAIT)
    assert str(caught.value.__cause__) == "node is draining"


def test_stats_add_up(encoder, batcher):
    sequences = texts(2, 100)
    batcher.submit(sequences).result(WAIT)
    batcher.close()
    stats = batcher.stats()
    assert (stats.calls, stats.sequences, stats.queued_calls, stats.queued_tokens) == (1, 100, 0, 0)
    assert stats.batches == len(encoder.seen)
    assert stats.tokens == sum(map(len, sequences))
    assert stats.computed_tokens == sum(encoder.padded_tokens(b.lengths) for b in encoder.seen)


def test_many_threads_get_their_own_rows(batcher):
    failures: list[str] = []

    def caller(seed: int) -> None:
        for round_ in range(10):
            mine = texts(seed * 100 + round_, 5)
            if not np.array_equal(batcher.submit(mine).result(WAIT), expected(mine)):
                failures.append(f"caller {seed}, round {round_}")

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not failures and not any(thread.is_alive() for thread in threads)
