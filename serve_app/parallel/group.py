"""What the ranks of a worker compute together: the few collectives of a forward pass, on CPUs (gloo) and GPUs (NCCL).

Every rank calls the same ones in the same order; torch.distributed takes the way that fits a tensor's device.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serve_app.parallel.place import Place

# A rank waits so long for others in a collective. One that is gone is noticed at once; this is for one that hangs.
# Weights of a large model may be read from a disk by one rank while another has them in memory.
TIMEOUT = timedelta(minutes=30)
# Until a rank has said who it is, once it is connected.
GREET = timedelta(seconds=60)
LOOPBACK = "127.0.0.1"


_DIGEST = hashlib.sha256().digest_size


class NotARank(RuntimeError):
    """Somebody else is connected, or nobody."""


def _digest(token: str, sender: int, receiver: int) -> bytes:
    return hashlib.sha256(f"{token} {sender} {receiver}".encode()).digest()


def _shown(token: str, sender: int, receiver: int) -> Tensor:
    return torch.tensor(list(_digest(token, sender, receiver)), dtype=torch.uint8)


class Group:
    """The ranks of one worker, seen from one of them. ``together_s`` adds up the seconds spent in collectives."""

    def __init__(self, place: Place, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.place, self.device = place, device
        self.together_s = 0.0
        mesh = init_device_mesh(device.type, (place.pipeline, place.tensor), mesh_dim_names=("stages", "parts"))
        # The ranks that divide this one's layers.
        self.mesh: Any = mesh["parts"]
        self._parts = self.mesh.get_group()
        # Sums of bfloat16 are taken in float32 where a processor takes them: gloo rounds after each rank.
        self._wide = device.type == "cpu"

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the parts' ``x``, of its dtype; bit for bit the same on all of them."""
        if self.place.tensor == 1 or not x.numel():
            return x
        with self._timed():
            dtype = x.dtype
            whole = x.float() if self._wide else x
            # A tensor of the caller's stays as it is.
            whole = whole.contiguous() if whole is not x else x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(whole, group=self._parts)
            return whole.to(dtype)

    def join_columns(self, x: Tensor) -> Tensor:
        """The parts' ``x`` [..., n], equally wide, side by side: [..., tensor * n]."""
        if self.place.tensor == 1:
            return x
        with self._timed():
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.place.tensor)]
            dist.all_gather(parts, x.contiguous(), group=self._parts)
            return torch.cat(parts, -1)

    def send_on(self, x: Tensor) -> None:
        """Hands hidden states to the same part of the next stage."""
        with self._timed():
            dist.send(x.contiguous(), self.place.rank + self.place.tensor)

    def take_on(self, like: Tensor) -> Tensor:
        """The hidden states that the stage before hands over, shaped like ``like``."""
        with self._timed():
            x = torch.empty_like(like, memory_format=torch.contiguous_format)
            dist.recv(x, self.place.rank - self.place.tensor)
            return x

    def collect(self, logits: Tensor, rows: int, widths: list[int]) -> Tensor:
        """At rank 0 the whole logits float32 [rows, sum of widths]; elsewhere what was given. ``widths``: the columns
        that each part of the last stage has computed; one number where every part has all of them.
        """
        place = self.place
        senders = list(place.last_ranks)[: len(widths)]
        if place.rank and place.rank not in senders:
            return logits
        with self._timed():
            if place.rank:
                if rows and widths[senders.index(place.rank)]:
                    dist.send(logits.float().contiguous(), 0)
                return logits
            parts: list[Tensor] = []
            waiting: list[Any] = []
            for sender, width in zip(senders, widths, strict=True):
                if sender == 0:
                    parts.append(logits.float())
                    continue
                parts.append(torch.empty(rows, width, device=self.device))
                if rows and width:
                    waiting.append(dist.irecv(parts[-1], sender))
            for each in waiting:
                each.wait()
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def everywhere(self, logits: Tensor, rows: int, widths: list[int]) -> Tensor:
        """What :meth:`collect` gives rank 0, on every rank: what they decide by it they decide alike."""
        whole = self.collect(logits, rows, widths)
        if self.place.rank:
            whole = torch.empty(rows, sum(widths), device=self.device)
        if whole.numel():
            whole = whole.contiguous()
            dist.broadcast(whole, 0)
        return whole

    def send_bytes(self, data: Tensor, rank: int) -> None:
        """Flat uint8 to another rank, which takes it with :meth:`take_bytes`."""
        if data.numel():
            dist.send(data.contiguous(), rank)

    def take_bytes(self, count: int, rank: int) -> Tensor:
        """Flat uint8 [count] from another rank, on this one's device."""
        data = torch.empty(count, dtype=torch.uint8, device=self.device)
        if count:
            dist.recv(data, rank)
        return data

    def told(self, data: bytes) -> bytes:
        """Rank 0's ``data``, on every rank."""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(size, 0)
        whole = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if not self.place.rank and data:
            whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(whole, 0)
        array: Any = whole.cpu().numpy()
        return array.tobytes()

    def most(self, value: float) -> float:
        """The largest of the ranks' values; each of them learns it."""
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    def greet(self, token: str) -> None:
        """Every two ranks that are connected show each other that they know the ``token``: gloo takes whoever connects
        first for the rank that it awaits, and any process of the machine can do that. Raises `NotARank`.
        """
        for group in [None, self._parts][: 1 + (self.place.tensor > 1)]:
            others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.place.rank]
            heard = {rank: torch.zeros(_DIGEST, dtype=torch.uint8) for rank in others}
            waiting: list[Any] = [dist.irecv(heard[rank], rank, group=group) for rank in others]
            said: list[Any] = [dist.isend(_shown(token, self.place.rank, rank), rank, group=group) for rank in others]
            for rank, work in zip(others, waiting, strict=True):
                try:
                    work.wait(GREET)
                except RuntimeError as error:
                    raise NotARank(f"rank {rank} has not shown that it is one: {error}") from error
                if not secrets.compare_digest(bytes(heard[rank].tolist()), _digest(token, rank, self.place.rank)):
                    raise NotARank(f"who is connected as rank {rank} is another")
            for work in said:
                work.wait(GREET)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.together_s += time.perf_counter() - began


@dataclass(slots=True)
class Meeting:
    """Where the ranks meet. On one machine that is a file of this user's alone; between machines a ``port`` of rank 0,
    whose ``store`` only rank 0 has.
    """

    host: str
    port: int = 0
    file: str = ""
    store: Any = None


def host_meeting(host: str, ranks: int) -> Meeting:
    """For rank 0."""
    if host == LOOPBACK:
        # Below the server's own folder, which ends with it. Elsewhere the variable is not set.
        kept = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/nowhere")).parent
        folder = tempfile.mkdtemp(prefix="ranks-", dir=kept if kept.is_dir() else None)
        return Meeting(host, file=str(Path(folder) / "meeting"))
    store = dist.TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False)
    return Meeting(host, store.port, store=store)


def join(place: Place, device: torch.device, meeting: Meeting, token: str) -> Group:
    """Meets the other ranks and returns once all of them have come and shown the ``token``. Raises `NotARank`."""
    if meeting.host == LOOPBACK:
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # else gloo asks for this machine's name, which may have no address
    store: Any
    if meeting.file:
        store = dist.FileStore(meeting.file, place.ranks)
    else:
        store = meeting.store or dist.TCPStore(meeting.host, meeting.port, place.ranks, is_master=False)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=TIMEOUT)
    group = Group(place, device)
    group.greet(token)
    if meeting.file and not place.rank:
        _left_behind.append(Path(meeting.file).parent)
    return group


_left_behind: list[Path] = []


def leave() -> None:
    """Ends this process's part of its group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    while _left_behind:
        shutil.rmtree(_left_behind.pop(), ignore_errors=True)
