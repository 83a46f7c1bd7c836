"""The first thing every worker does: bound its threads, and say how far it has come. Imports no torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from serve_app import logs
from serve_app.progress import report_progress
from serve_app.worker.spec import WorkerSpec

# For so long a thread may keep the interpreter while another wants it. The one that computes lets it go at each kernel,
# and would wait for Python's 5 ms behind the event loop's each time that there is something to do there.
SWITCH_S = 0.0005


def begin(spec: WorkerSpec, rank: int = 0) -> Callable[[str], None]:
    """Returns the function that reports the worker's steps. To be called before torch is imported. ``rank``: of a
    worker of several processes; those beside rank 0 are told of by it.
    """
    stage = f"{spec.stage} rank {rank}" if rank else spec.stage
    logs.set_up(f"{spec.stage} worker" + (f", rank {rank}" if rank else ""))
    sys.setswitchinterval(SWITCH_S)
    # torch's thread pool reads this once, at import.
    if spec.cpu_threads:
        os.environ["OMP_NUM_THREADS"] = str(spec.cpu_threads)
    started = time.time()
    return lambda step: report_progress(spec.model, stage, step, since=started)
