"""Questions about one text in an engine worker: the text is computed once, and each question goes on from its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from serve_app import logs
from serve_app.engine.request import Request
from serve_app.kv.keys import tenant_id
from serve_app.sampling_params import SamplingParams
from serve_app.wire.decide import DecideCall, Decided, DecideResult
from serve_app.wire.generate import Failed

if TYPE_CHECKING:
    from serve_app.worker.engine_work import EngineWork
    from serve_app.worker.requests import Finished

# The best token is drawn, and nobody looks at it.
ONE = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True)


async def decide(work: EngineWork, call: DecideCall) -> DecideResult:
    """Log-probabilities of what is asked about behind each branch; the first that fails ends them all."""
    logs.at_hand.set(call.origin)
    shared = np.frombuffer(call.shared, np.int32).tolist()
    root, tenant = work.root_of(call.salt, call.adapter.digest if call.adapter else ""), tenant_id(call.salt)
    share = call.share if call.priority == "batch" else None

    def request(name: str, tokens: list[int], asked: tuple[int, ...] = ()) -> Request:
        return Request(
            name, tokens, len(tokens), ONE, root, prefill_only=not asked, tenant=tenant, share=share,
            weight=call.weight, shared=len(shared), asked=asked,
        )  # fmt: skip

    first = await work.run_here(request(call.id, list(shared)), call.adapter, pooled=True)
    if isinstance(first, Failed):
        return first
    branches = [
        request(
            f"{call.id}-{number}",
            shared + np.frombuffer(branch.ids, np.int32).tolist(),
            tuple(np.frombuffer(branch.asked, np.int32).tolist()),
        )
        for number, branch in enumerate(call.branches)
    ]
    running = [asyncio.ensure_future(work.run_here(one, call.adapter)) for one in branches]
    try:
        ended = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    if failed := [result for result in ended if isinstance(result, Failed)]:
        return failed[0]
    return Decided(tuple(_told(result) for result in ended if not isinstance(result, Failed)), first.cached)


def _told(result: Finished) -> bytes:
    assert result.logprobs
    return np.array([value for _, value in result.logprobs[0].top], np.float32).tobytes()
