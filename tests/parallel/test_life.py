"""What rank 0 makes of ranks that say nothing any more, by looks."""

from __future__ import annotations

import time

import pytest

from serve_app.activity import Activity
from serve_app.parallel.life import RESTS, SILENT, RankWatch, Waiting


def activity(seconds: float, computed: float, runnable: bool = False) -> Activity:
    return Activity(seconds, {"1": computed}, 0, runnable)


def looks(watch: RankWatch, heard: list[int], seen: list[Activity | None]) -> list[str]:
    return [watch.look(count, lambda each=each: each) for count, each in zip(heard, seen, strict=True)]


def test_who_beats_is_well_whatever_it_does():
    resting = [activity(float(i), 1.0) for i in range(100)]
    assert not any(looks(RankWatch(), list(range(100)), resting))
    one_in_three = [i // 3 for i in range(100)]
    assert not any(looks(RankWatch(), one_in_three, resting))


def test_who_neither_beats_nor_computes_is_lost_soon():
    found = looks(RankWatch(), [7] * 20, [activity(float(i), 1.0) for i in range(20)])
    assert found.index(next(filter(None, found))) <= RESTS + 1
    assert f"neither said nor computed anything for {RESTS} s" in "".join(found)


@pytest.mark.parametrize(
    "seen",
    [
        [activity(float(i), float(i)) for i in range(200)],
        [activity(float(i), 1.0, runnable=True) for i in range(200)],
        [Activity(float(i), {"1": 1.0}, i, False) for i in range(200)],  # it waits for pages of weights
    ],
    ids=["computes", "wants a core", "reads"],
)
def test_a_long_computation_that_holds_the_interpreter_is_left_alone(seen):
    assert not any(looks(RankWatch(), [7] * 200, seen))


def test_on_another_machine_silence_alone_has_to_do():
    found = looks(RankWatch(), [7] * (SILENT + 2), [None] * (SILENT + 2))
    assert not any(found[:SILENT]) and f"said nothing for {SILENT} s" in found[SILENT]


def test_looks_count_and_not_time():
    """Rank 0 itself was stopped for an hour."""
    watch = RankWatch()
    assert not any(looks(watch, [1, 2, 2, 2], [activity(float(i), 1.0) for i in (0, 1, 3601, 3602)]))
    assert not any(looks(watch, [3, 4], [activity(float(i), 1.0) for i in (3603, 3604)]))


def test_waiting_is_counted_while_it_lasts_and_after():
    waiting = Waiting()
    assert waiting.seconds == waiting.total_s == 0
    with pytest.raises(OSError, match="gone"), waiting.counted():
        time.sleep(0.01)
        assert waiting.seconds >= 0.01
        raise OSError("gone")
    assert waiting.seconds == 0 and waiting.total_s >= 0.01
