"""How many threads a training has while others use the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


class Threads:
    """Uses as many threads as cores are free: two threads wait for each other when a neighbour holds one
    core.
    """

    def __init__(self, most: int) -> None:
        self.most, self.busy, self.own, self.wall = most, 0.0, 0.0, 0.0
        self.adapt()

    def adapt(self) -> None:
        """Call once a step: set torch's thread count from the cores others used since the last call
        (Linux).
        """
        try:
            ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            torch.set_num_threads(self.most)
            return
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own, wall = time.process_time(), time.monotonic()
        others = (busy - self.busy - (own - self.own)) / max(wall - self.wall, 1e-3)
        free = (os.cpu_count() or 1) - (others if self.wall else 0.0)
        torch.set_num_threads(max(1, min(self.most, int(free + 0.4))))
        self.busy, self.own, self.wall = busy, own, wall
