"""A process that hangs is told from one that is busy, whatever either of them answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from deployments import pulse
from deployments.pulse import Watch
from serve_app.activity import Activity, read_activity

pytestmark = pytest.mark.skipif(read_activity(os.getpid()) is None, reason="this system does not tell of threads")

# In the interpreter's lock, while other threads want it: a computation, and a wait for something that does not come.
# Several threads are in it: those that wait for the lock wake up all the time.
HELD = """
import ctypes, sys, threading, time
for _ in range(3):
    threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)], daemon=True).start()
print("ready", flush=True)
{}
"""
COMPUTES = HELD.format("sum(range(10**12))")
WAITS = HELD.format("ctypes.PyDLL(None).sleep(10**6)")
IDLES = HELD.format("time.sleep(10**6)").replace("range(3)", "range(0)")


@pytest.fixture
def started():
    running = []

    def start(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def rests(pid: int, looks: int = 3, period_s: float = 0.2) -> bool:
    """Whether a process rests at several looks in a row; False once it has not for a while."""
    in_a_row, before = 0, read_activity(pid)
    for _ in range(50):
        time.sleep(period_s)
        now = read_activity(pid)
        assert before is not None and now is not None
        in_a_row = 0 if now.computes_since(before) else in_a_row + 1
        before = now
        if in_a_row == looks:
            return True
    return False


@pytest.mark.parametrize("code", [WAITS, IDLES], ids=["waits in the lock", "idles"])
def test_a_process_that_computes_nothing_rests(started, code):
    assert rests(started(code))


def test_a_process_that_holds_the_interpreter_and_computes_does_not_rest_until_it_is_stopped(started):
    pid = started(COMPUTES)
    for _ in range(5):
        before = read_activity(pid)
        time.sleep(0.2)
        now = read_activity(pid)
        assert before is not None and now is not None and now.computes_since(before)
    os.kill(pid, signal.SIGSTOP)
    assert rests(pid)
    pulse.end(pid)
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
    assert read_activity(pid) is None or rests(pid)


def at(second: float, computed: float = 0.0, *, faults: int = 0, runnable: bool = False) -> Activity:
    return Activity(second, {"1": computed, "2": 0.01 * second}, faults, runnable)


def looks(watch: Watch, step_s, activities) -> list[str]:
    return [watch.look(step_s, activity) for activity in activities]


def test_silence_counts_while_nothing_is_computed():
    # The first look has nothing to compare with. It comes a moment after the question, which comes a moment after the
    # last answer: in all less than four seconds.
    resting = [at(0.5 * look) for look in range(5)]
    assert pulse.PERIOD_S + len(resting) * pulse.LOOK_S < 4.0
    assert looks(Watch(), None, resting[:4]) == [""] * 4
    assert "neither answered nor computed" in looks(Watch(), None, resting)[-1]
    # Each of these is a sign of life at every fourth second.
    for sign in (
        {"computed": 0.5}, {"faults": 1}, {"runnable": True},
    ):  # fmt: skip
        computed = 0.0
        watch = Watch()
        for second in range(40):
            alive = second % 4 == 0
            computed += sign.get("computed", 0.0) * alive
            told = at(
                second, computed, faults=second * (alive and "faults" in sign), runnable=alive and "runnable" in sign
            )
            assert watch.look(None, told) == ""
    watch = Watch()
    for second in range(40):  # an answer every fourth second
        assert watch.look(0.0 if second % 4 == 0 else None, at(second)) == ""


def test_a_replica_that_was_stopped_itself_counts_one_look():
    watch = Watch()
    assert looks(watch, None, [at(0), at(1), at(3601), at(3602)]) == [""] * 4


def test_a_system_that_tells_nothing_has_no_hung_workers():
    assert looks(Watch(), None, [None] * 100) == [""] * 100


def test_a_step_may_last_as_long_as_it_computes_and_not_for_ever_on_a_device():
    computing = [at(second, computed=second) for second in range(400)]
    assert looks(Watch(), 400.0, computing) == [""] * 400
    resting = [at(second) for second in range(31)]
    assert looks(Watch(), 40.0, resting[:30]) == [""] * 30
    assert "step has computed nothing" in looks(Watch(), 40.0, resting)[-1]
    assert looks(Watch(), 0.5, resting + resting) == [""] * 62  # short steps, one after the other
    assert "lasts longer" in looks(Watch(pulse.DEVICE_STEP_S), 400.0, computing[:1])[0]


def test_nobody_ends_himself():
    pulse.end(os.getpid())
