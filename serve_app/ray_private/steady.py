"""Serve's controller, where it measures how long something takes, by a clock that nobody puts back.

It looks after a replica again when so many seconds have passed by the wall clock (``deployment_state``), and after
HAProxy as well (``Timer``). Once that clock was put back by an hour, a replica that died was not missed for an hour:
seen in ``python -m benchmarks chaos --faults clock-jumps,decode-replica-killed,prefill-replica-killed``.
"""

from __future__ import annotations

import sys
import time
from typing import Any


class SteadyTime:
    """The module ``time``, but for :meth:`time`: the wall clock as it was at first, and the monotonic one since."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def time(self) -> float:
        """Seconds since 1970, as long as nobody has moved the clock."""
        return self._ahead + time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def measure_steadily() -> None:
    """For this process and its forks, where they have imported what the controller consists of."""
    deployments = sys.modules.get("ray.serve._private.deployment_state")
    utils = sys.modules.get("ray._common.utils")
    if deployments is not None and utils is not None:
        steady = SteadyTime()
        vars(deployments)["time"] = steady
        utils.Timer.time = lambda timer: steady.time()
