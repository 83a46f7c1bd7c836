"""What a fetch costs on this machine before one has been measured: from its memory and its network."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np

from serve_app.kv.costs import PRIORS

_PROBE_BYTES = 16 << 20
# Where no device tells its speed. What is taken to be too slow is not tried, and what is taken to be too fast is
# measured at once: so this is fast, and so is a network's nominal speed, of which transfers of objects reach a third.
_UNKNOWN_NETWORK = 25e9 / 8


@cache
def priors(interfaces: Path = Path("/sys/class/net")) -> dict[str, tuple[float, float]]:
    """As :data:`serve_app.kv.costs.PRIORS`; takes some ten milliseconds, once in a process."""
    found = dict(PRIORS)
    found["node"] = (PRIORS["node"][0], memory_bytes_s())
    found["remote"] = (PRIORS["remote"][0], network_bytes_s(interfaces) or _UNKNOWN_NETWORK)
    return found


def memory_bytes_s() -> float:
    """Of one thread that copies, as it takes chunks out of shared memory."""
    source, target = np.zeros(_PROBE_BYTES, np.uint8), np.zeros(_PROBE_BYTES, np.uint8)
    source[:] = 1  # pages that are there
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - began)
    return _PROBE_BYTES / max(best, 1e-9)


def network_bytes_s(interfaces: Path) -> float | None:
    """The nominal speed of the fastest network device that is up; None where none tells it, as in many clouds."""
    speeds = [0.0]
    for interface in interfaces.iterdir() if interfaces.is_dir() else ():
        try:
            if (interface / "device").exists() and (interface / "operstate").read_text().strip() == "up":
                speeds.append(float((interface / "speed").read_text()))  # Mbit/s; -1: it does not know
        except (OSError, ValueError):
            continue
    return max(speeds) * 1e6 / 8 or None
