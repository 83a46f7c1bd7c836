"""A rank that dies takes its worker with it, and leaves no process behind, whichever it was and whatever it did."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from pathlib import Path

import pytest

from serve_app.kv.parts import Payload
from serve_app.parallel.link import RankLost
from serve_app.worker.ranks import end_worker
from tests import tiny
from tests.parallel.groups import CONTEXT, divided, until


def work(path: Path, tensor: int, pipeline: int, told: multiprocessing.connection.Connection, ways: dict) -> None:
    """A worker that computes until it is ended."""
    with divided(path, tensor, pipeline, end=end_worker, **ways) as running:
        told.send([state["pid"] for state in running.ranks.states()])
        engine = tiny.make_engine(running.model)
        for turn in range(1 << 30):
            for index in range(8):  # which several stages divide
                prompt = [3, 4 + index, 5 + turn % 200]
                engine.add(tiny.make_request(f"{turn} {index}", prompt, max_tokens=50, ignore_eos=True))
            while engine.has_work:
                engine.step()
            if turn == 0:
                told.send("computes")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "killed"),
    [
        *(("llama", rank) for rank in range(4)),
        *(("mixtral", rank) for rank in range(4)),
        *(("qwen3_next", rank) for rank in (0, 1, 3)),
    ],
)
def test_all_ranks_end_with_any_of_them(tmp_path, family, killed):
    tensor = pipeline = 2
    path = tiny.write_checkpoint(tmp_path / family, family)
    # Of the mixture rows travel to their experts.
    ways = {"expert_parallel": 2, "expert_dispatch": "always"} if family == "mixtral" else {}
    here, there = CONTEXT.Pipe()
    worker = CONTEXT.Process(target=work, args=(path, tensor, pipeline, there, ways))
    worker.start()
    try:
        pids = here.recv()
        assert len(set(pids)) == tensor * pipeline and here.recv() == "computes"
        os.kill(pids[killed], signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in pids))
    finally:
        worker.kill()
        worker.join()


def test_rank_0_hears_which_rank_it_was(tmp_path, one_thread):
    path = tiny.write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    with divided(path, 2) as running:
        os.kill(running.ranks.handles[0].pid, signal.SIGKILL)
        until(lambda: running.lost)
        assert "rank 1 of 2" in running.lost[0]


@pytest.mark.slow
@pytest.mark.parametrize("division", [(2, 1), (1, 2)])
def test_a_rank_that_is_stopped_is_lost_and_leaves_nothing(tmp_path, one_thread, division):
    """A step waits for it in a collective, and ends with it."""
    path = tiny.write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=2)
    with divided(path, *division) as running:
        engine = tiny.make_engine(running.model)
        for index in range(8):
            engine.add(tiny.make_request(str(index), [3, 4, 5 + index], max_tokens=9, ignore_eos=True))
        engine.step()
        process = running.ranks.handles[0]
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError):
            while engine.has_work:
                engine.step()
        until(lambda: running.lost)
        assert "rank 1 of 2" in running.lost[0] and "neither said nor computed" in running.lost[0]
        process.join(30)
        assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_copy_that_fails_ends_the_worker(tmp_path, one_thread):
    """It has left ranks at different places; what engines go on after must not go on here."""
    path = tiny.write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    with divided(path, 2) as running:
        kv = running.model.kv_shape.allocate(4, "cpu")
        kv.copy_within([1], [2])
        assert running.lost == []
        os.kill(running.ranks.handles[0].pid, signal.SIGKILL)
        running.ranks.handles[0].join(30)
        with pytest.raises(RuntimeError):
            while True:
                kv.copy_within([1], [2])
        assert "rank 1 of 2" in running.lost[0]


@pytest.mark.slow
def test_ranks_that_have_not_read_the_same_end_the_worker(tmp_path, one_thread):
    """A chunk that one of them does not hold: what the others have copied by then is of no use."""
    path = tiny.write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    with divided(path, 2) as running:
        kv = running.model.kv_shape.allocate(4, "cpu")
        whole = tiny.load(path).kv_shape.allocate(4, "cpu").copy_out([1, 2])
        kv.copy_in([1, 2], Payload((), (whole.numpy(),), 7))
        until(lambda: running.lost)
        assert "rank 1 of 2" in running.lost[0] and "KeyError: 7" in running.lost[0]


def test_a_rank_that_can_not_load_says_why(tmp_path, one_thread):
    """A model that does not divide is refused by all ranks; one rank's own trouble comes up with its number."""
    path = tiny.write_checkpoint(tmp_path / "gpt2", "gpt2")
    began = time.monotonic()
    with pytest.raises((RankLost, ValueError), match="no plan by which ranks divide"), divided(path, 2):
        pass
    assert time.monotonic() - began < 120
