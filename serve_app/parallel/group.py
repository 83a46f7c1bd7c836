"""What the ranks of a worker compute together: the few collectives of a forward pass, on CPUs (gloo) and GPUs (NCCL).

Every rank calls the same ones in the same order; torch.distributed takes the way that fits a tensor's device. That is
the group's own for bytes, and for what is computed the one it was computed on: the check at load computes on processors
whatever the ranks' devices are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from serve_app.parallel.life import Waiting
from serve_app.parallel.place import Place
from serve_app.parallel.shared import SharedSums, share


class Group:
    """The ranks of one worker, seen from one of them. ``waiting`` counts the time in collectives.

    ``agree(ok)``: whether all ranks say yes, however long each takes; every one asks at the same places
    (:meth:`.link.Leader.agree`).
    """

    def __init__(self, place: Place, device: torch.device, waiting: Waiting, agree: Callable[[bool], bool]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.place, self.device = place, device
        self.waiting, self.agree = waiting, agree
        mesh = init_device_mesh(device.type, (place.pipeline, place.tensor), mesh_dim_names=("stages", "parts"))
        # The ranks that divide this one's layers.
        self.mesh: Any = mesh["parts"]
        self._parts = self.mesh.get_group()
        # All that this rank is connected with.
        self.circles: list[Any] = [None, self._parts][: 1 + (place.tensor > 1)]
        # Of ranks that divide layers on one machine's processors (:meth:`share_memory`).
        self._shared: SharedSums | None = None
        # What has been sent and may not have arrived.
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def share_memory(self, timeout_s: float) -> None:
        """Sums go through memory from now on, where that can be had; all ranks are on one machine and call it."""
        if self.place.tensor > 1 and self.device.type == "cpu":
            self._shared = share(self.place.part, self.place.tensor, self.told_parts, self.agree, timeout_s)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the parts' ``x``, of its dtype; bit for bit the same on all of them."""
        if self.place.tensor == 1 or not x.numel():
            return x
        with self.waiting.counted():
            if self._shared is not None and self._shared.takes(x):
                return self._shared.sum(x)
            dtype = x.dtype
            # Where a processor adds them up it is in float32: gloo rounds after each rank.
            whole = x.float() if x.device.type == "cpu" else x
            # A tensor of the caller's stays as it is.
            whole = whole.contiguous() if whole is not x else x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(whole, group=self._parts)
            return whole.to(dtype)

    def join_columns(self, x: Tensor) -> Tensor:
        """The parts' ``x`` [..., n], equally wide, side by side: [..., tensor * n]."""
        if self.place.tensor == 1:
            return x
        with self.waiting.counted():
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.place.tensor)]
            dist.all_gather(parts, x.contiguous(), group=self._parts)
            return torch.cat(parts, -1)

    def exchange(self, x: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Rows of ``x`` [sum of ``give``, ...] to the parts, so many to each in their order; what comes of them, so
        many of each: [sum of ``take``, ...].
        """
        with self.waiting.counted():
            found = x.new_empty(sum(take), *x.shape[1:])
            dist.all_to_all_single(found, x.contiguous(), take, give, group=self._parts)
            return found

    def send_on(self, x: Tensor) -> None:
        """Hands hidden states to the same part of the next stage, without waiting until it takes them."""
        # What follows here may write to them.
        self._send(x.clone(memory_format=torch.contiguous_format), self.place.rank + self.place.tensor)

    def _send(self, data: Tensor, rank: int) -> None:
        """Who takes it does so when it comes to it. As many as there are stages may be under way."""
        if len(self._sent) >= self.place.pipeline:
            with self.waiting.counted():
                self._sent.popleft()[0].wait()
        self._sent.append((dist.isend(data, rank), data))

    def take_on(self, like: Tensor) -> Tensor:
        """The hidden states that the stage before hands over, shaped like ``like``."""
        with self.waiting.counted():
            x = torch.empty_like(like, memory_format=torch.contiguous_format)
            dist.recv(x, self.place.rank - self.place.tensor)
            return x

    def collect(self, logits: Tensor, rows: int, widths: list[int]) -> Tensor:
        """At rank 0 the whole logits float32 [rows, sum of widths]; elsewhere what was given. ``widths``: the columns
        that each part of the last stage has computed; one number where every part has all of them.
        """
        return self.collecting(logits, rows, widths)()

    def collecting(self, logits: Tensor, rows: int, widths: list[int]) -> Callable[[], Tensor]:
        """As :meth:`collect`: what is given waits. Other steps may begin before; all are waited for in their order."""
        place = self.place
        senders = list(place.last_ranks)[: len(widths)]
        if place.rank:
            if place.rank in senders and rows and widths[senders.index(place.rank)]:
                self._send(logits.float().contiguous(), 0)
            return lambda: logits
        parts: list[Tensor] = []
        coming: list[Any] = []
        for sender, width in zip(senders, widths, strict=True):
            if sender == 0:
                parts.append(logits.float())
                continue
            parts.append(torch.empty(rows, width, device=logits.device))
            if rows and width:
                coming.append(dist.irecv(parts[-1], sender))

        def whole() -> Tensor:
            with self.waiting.counted():
                while coming:
                    coming.pop(0).wait()
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

        return whole

    def everywhere(self, logits: Tensor, rows: int, widths: list[int]) -> Tensor:
        """What :meth:`collect` gives rank 0, on every rank: what they decide by it they decide alike."""
        whole = self.collect(logits, rows, widths)
        if self.place.rank:
            whole = torch.empty(rows, sum(widths), device=logits.device)
        if whole.numel():
            whole = whole.contiguous()
            with self.waiting.counted():
                dist.broadcast(whole, 0)
        return whole

    def send_bytes(self, data: Tensor, rank: int) -> None:
        """Flat uint8 to another rank, which takes it with :meth:`take_bytes`."""
        if data.numel():
            self._send(data.contiguous(), rank)

    def take_bytes(self, count: int, rank: int) -> Tensor:
        """Flat uint8 [count] from another rank, on this one's device."""
        data = torch.empty(count, dtype=torch.uint8, device=self.device)
        if count:
            with self.waiting.counted():
                dist.recv(data, rank)
        return data

    def taking_bytes(self, count: int, rank: int) -> tuple[Tensor, Any]:
        """As :meth:`take_bytes`, without waiting: the bytes are there once the second has been waited for."""
        data = torch.empty(count, dtype=torch.uint8, device=self.device)
        return data, dist.irecv(data, rank)

    def told(self, data: bytes) -> bytes:
        """Rank 0's ``data``, on every rank."""
        return self._told(data, 0, None)

    def told_parts(self, data: bytes) -> bytes:
        """The ``data`` of a stage's first part, on all of them."""
        return self._told(data, self.place.stage * self.place.tensor, self._parts)

    def _told(self, data: bytes, source: int, circle: Any) -> bytes:
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        with self.waiting.counted():
            dist.broadcast(size, source, group=circle)
            whole = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            if self.place.rank == source and data:
                whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(whole, source, group=circle)
        array: Any = whole.cpu().numpy()
        return array.tobytes()
