"""Sums in memory that ranks of one machine share."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from serve_app.kernels.library.load import cpu_library
from serve_app.parallel import shared
from serve_app.parallel.shared import PART, RankEnded, SharedSums, share
from tests.parallel.groups import CONTEXT

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="needs a C++ compiler")
# Numbers: fewer than a place has, as many, and several places full; and none of a strip's width.
SIZES = (1, 77, 512 * 3 + 5, PART // 4, PART // 4 * 3 + 9, PART)


def meet(rank: int, ranks: int, lines: list) -> SharedSums | None:
    """``lines``: rank 0's ends of the pipes to the others, or another's end of its own."""

    def told(data: bytes) -> bytes:
        if rank:
            return lines[0].recv_bytes()
        for line in lines:
            line.send_bytes(data)
        return data

    def agree(ok: bool) -> bool:
        if rank:
            lines[0].send_bytes(bytes([ok]))
        else:
            ok = all([line.recv_bytes() == b"\1" for line in lines]) and ok
        return told(bytes([ok])) == b"\1"

    return share(rank, ranks, told, agree, timeout_s=1.5)


def numbers(rank: int, turn: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def other(rank: int, ranks: int, line, what: str) -> None:
    if what == "has no kernels":
        shared.cpu_library = lambda: None
    sums = meet(rank, ranks, [line])
    line.send(sums is not None)
    if sums is None:
        return
    torch.set_num_threads(1)
    for turn, (size, dtype) in enumerate((size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)):
        line.send(sums.sum(numbers(rank, turn, size, dtype)).float().numpy())
    if what == "ends":
        os._exit(0)
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "does not come":
        time.sleep(20)
    line.recv()


class Others:
    def __init__(self, ranks: int, what: str = "") -> None:
        pipes = [CONTEXT.Pipe() for _ in range(1, ranks)]
        self.lines = [mine for mine, _ in pipes]
        self.processes = [
            CONTEXT.Process(target=other, args=(rank, ranks, theirs, what), daemon=True)
            for rank, (_, theirs) in enumerate(pipes, 1)
        ]

    def __enter__(self) -> Others:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for line, process in zip(self.lines, self.processes, strict=True):
            line.close()
            process.kill()
            process.join()


def added_up(sums: SharedSums, ranks: int, lines: list) -> None:
    """Those of all sizes are what float32 gives in the order of ranks, rounded once, to the last bit and on all."""
    cases = [(size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)]
    for turn, (size, dtype) in enumerate(cases):
        own = numbers(0, turn, size, dtype)
        found = sums.sum(own.view(-1, 1).expand(-1, 1))
        wanted = own.float()
        for rank in range(1, ranks):
            wanted = wanted + numbers(rank, turn, size, dtype).float()
        assert found.dtype is dtype and torch.equal(found.flatten(), wanted.to(dtype))
        assert torch.equal(own, numbers(0, turn, size, dtype))
        for line in lines:
            assert torch.equal(torch.from_numpy(line.recv()).to(dtype), found.flatten())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_get_the_same_sums(ranks):
    with Others(ranks) as others:
        sums = meet(0, ranks, others.lines)
        assert sums is not None and all([line.recv() for line in others.lines])
        added_up(sums, ranks, others.lines)


@pytest.mark.parametrize("what", ["ends", "is killed", "does not come"])
def test_who_waits_for_a_rank_that_has_gone_learns_it(what):
    with Others(2, what) as others:
        sums = meet(0, 2, others.lines)
        assert others.lines[0].recv()
        added_up(sums, 2, others.lines)
        with pytest.raises(RankEnded, match="has not come" if what == "does not come" else "rank 1 of those"):
            sums.sum(torch.ones(5))


def test_ranks_agree_that_there_is_none():
    """Where one of them has no kernels, and where the first can't make any memory."""
    with Others(3, "has no kernels") as others:
        assert meet(0, 3, others.lines) is None
        assert [line.recv() for line in others.lines] == [False, False]
    with pytest.MonkeyPatch.context() as patch, Others(2) as others:
        patch.setattr(shared, "_made", lambda size: -1)
        assert meet(0, 2, others.lines) is None and others.lines[0].recv() is False


def test_memory_of_another_size_or_name_is_not_taken():
    fd = os.memfd_create("serve-app-ranks")
    os.ftruncate(fd, 4096)
    assert shared._mapped(os.getpid(), fd, 4096) is not None
    assert shared._mapped(os.getpid(), fd, 8192) is None
    other_fd = os.memfd_create("something-else")
    os.ftruncate(other_fd, 4096)
    assert shared._mapped(os.getpid(), other_fd, 4096) is None
    assert shared._mapped(2**22 + 1, 3, 4096) is None
    os.close(fd)
    os.close(other_fd)


def test_numbers_that_are_none_stay_so():
    """Of one rank alone sums are what it gives: infinities, NaN and the smallest numbers among them."""
    sums = share(0, 1, lambda data: data, lambda ok: ok, timeout_s=1.0)
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e-40, -0.0, 3.3895e38], dtype=dtype)
        assert torch.equal(sums.sum(given).nan_to_num(7.0), given.nan_to_num(7.0))


def test_what_is_added_up_elsewhere():
    assert SharedSums.takes(torch.ones(1)) and SharedSums.takes(torch.ones(1, dtype=torch.bfloat16))
    assert not SharedSums.takes(torch.ones(1, dtype=torch.float64))
    assert not SharedSums.takes(torch.ones(1, device="meta"))
