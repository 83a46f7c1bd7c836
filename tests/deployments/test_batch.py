"""The replica that runs batches."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from deployments.batch import NICE, make_way


def test_a_runner_makes_way_with_all_threads_that_it_starts() -> None:
    told: list[tuple[int, int]] = []

    def tell() -> None:
        told.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))

    def run() -> None:
        tell()
        make_way()
        tell()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(tell).result()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    tell()
    before, way, started, others = told
    assert way == started == (os.SCHED_BATCH, min(19, before[1] + NICE))
    assert others == before, "other threads of the process keep theirs"
