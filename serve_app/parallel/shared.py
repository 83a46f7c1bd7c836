"""Sums of ranks that divide layers on one machine, in memory that they share (``kernels/cpu/together.cpp``): what
sockets take for a step's few thousand numbers is many times what adding them up takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import struct
import time
from collections.abc import Callable

import torch
from torch import Tensor

from serve_app.kernels.library.load import cpu_library

# Bytes of one rank's numbers that are added up at a time; each has two such places.
PART = 256 << 10
_LINE = 64
# Looks at another's line, some tens of nanoseconds each, before this rank sleeps until that one comes: where there are
# fewer cores than ranks, who looks keeps from its work whom it waits for.
SPINS = 200
# It then sleeps so long before it looks whether the others live.
LOOK_NS = 50_000_000
_DTYPES = (torch.float32, torch.bfloat16)
_NAME = "serve-app-ranks"
# In its line each rank says which process it is.
_PID, _PID_AT = struct.Struct("q"), 16


class RankEnded(RuntimeError):
    """Another rank has ended, or does not come."""


class _Args(ctypes.Structure):
    """``Args`` of together.cpp."""

    _fields_ = [("memory", ctypes.c_void_p), ("x", ctypes.c_void_p), ("out", ctypes.c_void_p)] + [
        (name, ctypes.c_int64)
        for name in (
            "count", "bfloat16", "rank", "ranks", "part_bytes", "done", "come", "written", "spins", "wait_ns",
        )
    ]  # fmt: skip


class SharedSums:
    """One rank's side. ``pids`` are the processes of all; ``timeout_s``: for how long one waits for the others."""

    def __init__(self, memory: mmap.mmap, rank: int, pids: list[int], timeout_s: float) -> None:
        library = cpu_library()
        assert library is not None
        self._add_up, self._memory, self._timeout_s = library.add_up, memory, timeout_s
        self._broken, self._others = False, {}
        self._ends = select.poll()
        for other, pid in enumerate(pids):
            if other != rank:
                self._others[os.pidfd_open(pid)] = other
        for pidfd in self._others:
            self._ends.register(pidfd, select.POLLIN)
        self._args = _Args(rank=rank, ranks=len(pids), part_bytes=PART, spins=SPINS, wait_ns=LOOK_NS)
        self._args.memory = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    @staticmethod
    def takes(x: Tensor) -> bool:
        return x.device.type == "cpu" and x.dtype in _DTYPES

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, of its dtype, added up in float32 in the order of ranks. Raises
        :class:`RankEnded`.
        """
        if self._broken:
            raise RankEnded("a sum before this one has failed")
        x = x.contiguous()
        out, args = torch.empty_like(x), self._args
        args.x, args.out, args.count = x.data_ptr(), out.data_ptr(), x.numel()
        args.bfloat16, args.done, args.written = x.dtype is torch.bfloat16, 0, 0
        until = 0.0
        while self._add_up(ctypes.byref(args)):
            until = until or time.monotonic() + self._timeout_s
            self._look(until)
        return out

    def _look(self, until: float) -> None:
        self._broken = True
        for pidfd, _ in self._ends.poll(0):
            raise RankEnded(f"rank {self._others[pidfd]} of those that divide a layer has ended")
        if time.monotonic() > until:
            raise RankEnded(f"a rank has not come to where layers are added up for {self._timeout_s:.0f} s")
        self._broken = False

    def __del__(self) -> None:
        for pidfd in getattr(self, "_others", {}):
            os.close(pidfd)


def share(
    rank: int, ranks: int, told: Callable[[bytes], bytes], agree: Callable[[bool], bool], timeout_s: float
) -> SharedSums | None:
    """Memory for ``ranks`` on one machine; every one calls it. ``told`` gives all what the first says, and ``agree``
    whether all say yes. None where it can't be had: without the kernels, or where processes may not see each other.
    """
    size, own = ranks * (_LINE + 2 * PART), -1
    able = cpu_library() is not None
    try:
        if able and not rank:
            own = _made(size)
        pid, there = (int(each) for each in told(f"{os.getpid()} {own}".encode()).split())
        memory = _mapped(pid, there, size) if able and there >= 0 else None
        if memory is not None:
            _PID.pack_into(memory, rank * _LINE + _PID_AT, os.getpid())
        if not agree(memory is not None) or memory is None:
            return None
        pids = [_PID.unpack_from(memory, each * _LINE + _PID_AT)[0] for each in range(ranks)]
        found: SharedSums | None = None
        with contextlib.suppress(AttributeError, OSError):  # a Python without pidfd_open
            found = SharedSums(memory, rank, pids, timeout_s)
        return found if agree(found is not None) else None
    finally:
        if own >= 0:
            os.close(own)


def _made(size: int) -> int:
    """Memory that no file system shows, and that goes with the last who has it; -1 where there is none."""
    fd = -1
    try:
        fd = os.memfd_create(_NAME)
        os.ftruncate(fd, size)
    except (AttributeError, OSError):  # elsewhere than on Linux, and where a limit is set
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _mapped(pid: int, fd: int, size: int) -> mmap.mmap | None:
    """What a process of this user has open as ``fd``."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        opened = os.open(path, os.O_RDWR)
        try:
            told = os.fstat(opened)
            return mmap.mmap(opened, size) if (told.st_uid, told.st_size) == (os.getuid(), size) else None
        finally:
            os.close(opened)
    except OSError:
        return None
