"""What a worker reports is what routing takes it to be."""

from __future__ import annotations

from collections import deque

import numpy as np

from serve_app.channel.sender import TokenSender
from serve_app.engine.request import Request
from serve_app.sampling_params import SamplingParams
from serve_app.worker.load_report import WorkerLoad
from tests.engine.fake import HistoryModel, make_engine
from tests.tiny import ROOT


async def test_prompts_computed_for_others_are_work_but_no_streams() -> None:
    """As streams they would make a prefill worker look slower than it is, and a decode worker fuller."""
    engine = make_engine(HistoryModel(), max_num_seqs=4, max_batch_tokens=64, max_model_len=512)
    sender = TokenSender("w")
    load = WorkerLoad("m", "decode", "n1", engine, sender, deque())
    prompt = np.arange(100) % 30
    for number in range(6):
        sampling = SamplingParams(max_tokens=8, temperature=0)
        engine.add(Request(f"r{number}", prompt.tolist(), 100, sampling, ROOT, prefill_only=number % 2 == 0))
    before, steps = load._measure(), 0
    assert (before.running, before.waiting, before.queued_tokens > 500) == (0, 3, True)
    while engine.has_work:
        engine.step()
        now = load._measure()
        streams = [r for r in (*engine.scheduler.running, *engine.scheduler.waiting) if not r.prefill_only]
        assert now.running + now.waiting == len(streams)
        assert now.running <= 4
        steps += len(now.steps)
    after = load._measure()
    assert (after.running, after.waiting, after.queued_tokens) == (0, 0, 0) and steps > 6
    await sender.aclose()
