"""The draft model's actor, and the way to it."""

from __future__ import annotations

from collections.abc import Callable

import ray

from serve_app.wire.draft import Proposals, ProposeCall, read_proposals, read_propose_call
from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec

NAMESPACE = "serve_app"
# A step waits for its drafts no longer.
TIMEOUT_S = 1.0


@ray.remote(num_cpus=0)
class DraftWorker:
    """The work is :class:`serve_app.worker.draft_work.DraftWork`."""

    def __init__(self, spec: WorkerSpec) -> None:
        progress = begin(spec)
        from serve_app.worker.draft_work import DraftWork

        self._work = DraftWork(spec, progress)

    def propose(self, call: bytes) -> bytes:
        return self._work.propose(read_propose_call(call)).encode()

    def stats(self) -> bytes:
        return self._work.stats().encode()

    def pulse(self) -> bytes:
        """For :class:`deployments.supervisor.Supervisor`."""
        return self._work.pulse().encode()


def draft_worker(name: str) -> Callable[[ProposeCall], Proposals]:
    """Asks the draft worker of this name; raises ``RayError`` where it does not answer in time. Finding it blocks."""
    actor = ray.get_actor(name, namespace=NAMESPACE)
    return lambda call: read_proposals(ray.get(actor.propose.remote(call.encode()), timeout=TIMEOUT_S))
