"""How the ranks of a worker find each other, and know that nobody else is among them.

On one machine they meet in a file of this user's alone, between machines at a port of rank 0. Gloo takes whoever
connects first for the rank that it awaits, which any process of the machine can do: so every two ranks show each other
the token of the line before they compute anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serve_app.parallel.group import Group
from serve_app.parallel.life import Waiting
from serve_app.parallel.link import LOOPBACK
from serve_app.parallel.place import Place

# A rank waits so long for others in a collective; one that is gone or hangs is noticed before (:mod:`.life`). Where one
# may need longer than others, as with weights that it reads from a disk, all :meth:`.Group.agree` before they go on.
TIMEOUT = timedelta(minutes=2)
# Until a rank has said who it is, once it is connected.
GREET = timedelta(seconds=60)
_ADDRESS_OF = 0x8915  # Linux's SIOCGIFADDR
_DIGEST = hashlib.sha256().digest_size
# Folders of meetings that are over.
_left_behind: list[Path] = []


class NotARank(RuntimeError):
    """Somebody else is connected, or nobody."""


@dataclass(slots=True)
class Meeting:
    """Where the ranks meet: a ``file`` on one machine; a ``port`` between machines, whose ``store`` only rank 0 has."""

    host: str
    port: int = 0
    file: str = ""
    store: Any = None


def host_meeting(host: str, ranks: int) -> Meeting:
    """For rank 0."""
    if host == LOOPBACK:
        # Below the server's own folder, which ends with it. Elsewhere the variable is not set.
        kept = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/nowhere")).parent
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=kept if kept.is_dir() else None))
        _left_behind.append(folder)
        return Meeting(host, file=str(folder / "meeting"))
    # The store asks for no key, so it listens at ``host`` alone; by itself it would at every address of the machine.
    listener = socket.create_server((host, 0), backlog=128)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=TIMEOUT
    )
    return Meeting(host, port, store=store)


def join(
    place: Place,
    device: torch.device,
    meeting: Meeting,
    token: str,
    *,
    waiting: Waiting,
    agree: Callable[[bool], bool],
) -> Group:
    """Meets the other ranks and returns once all of them have come and shown the ``token``. Raises :class:`NotARank`.
    ``waiting`` and ``agree``: see :class:`.Group`.
    """
    # Else gloo asks for this machine's name, which may have no address, or one that others do not reach.
    if name := interface_towards(meeting.host):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    store: Any = meeting.store
    if meeting.file:
        store = dist.FileStore(meeting.file, place.ranks)
        store.set_timeout(TIMEOUT)
    elif store is None:
        store = dist.TCPStore(meeting.host, meeting.port, place.ranks, is_master=False, timeout=TIMEOUT)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=TIMEOUT)
    group = Group(place, device, waiting, agree)
    for circle in group.circles:
        _greet(circle, place.rank, token)
    if meeting.file:
        group.share_memory(TIMEOUT.total_seconds())
    return group


def interface_towards(host: str) -> str:
    """The network interface of this machine by which it reaches ``host``, an address of IPv4, which may be its own; ""
    where that can't be told.
    """
    if host.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # nothing is sent
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # one without an address
                    asked = struct.pack("256s", name.encode()[:15])
                    if fcntl.ioctl(probe.fileno(), _ADDRESS_OF, asked)[20:24] == own:
                        return name
        except OSError:
            pass
    return ""


def leave() -> None:
    """Ends this process's part of its group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    while _left_behind:
        shutil.rmtree(_left_behind.pop(), ignore_errors=True)


def _greet(circle: Any, own: int, token: str) -> None:
    """Every two ranks of a process group show each other that they know the ``token``. Raises :class:`NotARank`."""
    others = [rank for rank in dist.get_process_group_ranks(circle) if rank != own]
    heard = {rank: torch.zeros(_DIGEST, dtype=torch.uint8) for rank in others}
    waiting: list[Any] = [dist.irecv(heard[rank], rank, group=circle) for rank in others]
    said: list[Any] = [dist.isend(_shown(token, own, rank), rank, group=circle) for rank in others]
    for rank, work in zip(others, waiting, strict=True):
        try:
            work.wait(GREET)
        except RuntimeError as error:
            raise NotARank(f"rank {rank} has not shown that it is one: {error}") from error
        if not secrets.compare_digest(bytes(heard[rank].tolist()), _digest(token, rank, own)):
            raise NotARank(f"who is connected as rank {rank} is another")
    for work in said:
        work.wait(GREET)


def _digest(token: str, sender: int, receiver: int) -> bytes:
    return hashlib.sha256(f"{token} {sender} {receiver}".encode()).digest()


def _shown(token: str, sender: int, receiver: int) -> Tensor:
    return torch.tensor(list(_digest(token, sender, receiver)), dtype=torch.uint8)
