"""A Serve request router that follows a choice made by whoever sends the request.

The gateway knows loads that are a tenth of a second old and where prompts are cached; Serve knows which replicas are
there. So the request carries a wish, and Serve keeps what it is good at: life cycle, draining, autoscaling.

Serve pickles the class by value with its module's globals and runs it wherever there is a handle: this module imports
nothing of ours.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# The keyword of a call that names the wished replica (its `unique_id`).
HINT = "replica"


class HintedRequestRouter(PowerOfTwoChoicesRequestRouter):
    """Sends a call to the replica that its keyword names; without one, or if it is gone, to one of two at
    random with the shorter queue, as Serve does by itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._routed: weakref.WeakKeyDictionary[Any, PendingRequest] = weakref.WeakKeyDictionary()

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Gives the replica to the request for which the running task has chosen it.

        The default hands it to whichever request waits longest; here every request has a choice of its own. Serve's
        other way, by the metadata's id, knows only one of several calls made by one HTTP request: the others would wait
        for ever.
        """
        pending = self._routed.get(asyncio.current_task())
        if pending is None or pending.future.done():
            RequestRouter._fulfill_next_pending_request(self, replica, request_metadata)
            return
        self._cancel_routing_task_for_pending_request(pending)
        self._record_queue_wait_time(pending)
        pending.future.set_result(replica)
        self._remove_pending_request_from_indices(pending)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            self._routed[asyncio.current_task()] = pending_request
        hint = _hint(pending_request)
        wished = [r for r in candidate_replicas if r.replica_id.unique_id == hint] if hint else []
        others = await super().choose_replicas(candidate_replicas, pending_request)
        return [wished, *others] if wished else others


def _hint(pending_request: PendingRequest | None) -> Any:
    return pending_request.kwargs.get(HINT) if pending_request is not None else None
