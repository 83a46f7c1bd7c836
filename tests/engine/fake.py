"""A language model without weights whose every logit depends on the whole history as the paged cache gives it back.

Lost, stale or foreign blocks change its output, which makes it a probe for the scheduler's book-keeping; and since
nothing is multiplied, results are bit for bit the same in every batch.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool
from serve_app.engine.engine import Engine
from serve_app.engine.kv_cache import KVShape
from serve_app.engine.penalties import SampleRow
from serve_app.engine.pipeline import PipelineEngine
from serve_app.engine.request import Request
from serve_app.engine.runner import Runner
from serve_app.engine.sampling import sample
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.step import Batch
from serve_app.sampling_params import SamplingParams, TokenLogprobs
from tests.tiny import ROOT

SHAPE = KVShape.uniform(1, 1, 1, torch.float32)


@dataclass(slots=True)
class HistoryModel:
    vocab: int = 32
    spread: float = 2.0
    salt: int = 0

    def logits(self, history: Sequence[int]) -> np.ndarray:
        """float32 [vocab], the same for the same tokens."""
        seed = zlib.crc32(np.asarray(history, np.float32).tobytes(), self.salt)
        return np.random.Generator(np.random.SFC64(seed)).standard_normal(self.vocab, np.float32) * self.spread

    def forward(self, batch: Batch) -> Tensor:
        """Writes the tokens as K, reads each request's history through its block table; logits [S, vocab]."""
        batch.kv.layer(0)[0, :, 0, :, 0].view(-1)[batch.slots] = batch.input_ids.float()
        wanted = set(batch.sample_rows.tolist())
        rows = []
        for index, seq_len in enumerate(batch.seq_lens.tolist()):
            first, last = batch.query_start[index : index + 2].tolist()
            table = batch.block_tables[index].long()
            history = batch.kv.layer(0)[0, table, 0, :, 0].reshape(-1)[:seq_len].numpy()
            for row in range(first, last):
                position = seq_len - (last - first) + (row - first)
                assert int(batch.positions[row]) == position
                if row in wanted:
                    rows.append(self.logits(history[: position + 1]))
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self.vocab)


def make_engine(model: HistoryModel, *, num_blocks: int = 64, speculation=None, **options) -> Engine:
    runner = Runner(model.forward, SHAPE.allocate(num_blocks, "cpu"))
    return Engine(runner, Scheduler(BlockPool(num_blocks), **options), speculation=speculation)


class Stages:
    """A pipeline that computes as late as it can: what was begun, in its order, once something is waited for."""

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        self._forward = forward
        self._begun: deque[tuple[Batch, list[Tensor]]] = deque()
        self.most = 0

    def submit(self, batch: Batch) -> Callable[[], Tensor]:
        found: list[Tensor] = []
        self._begun.append((batch, found))
        self.most = max(self.most, len(self._begun))

        def logits() -> Tensor:
            while not found:
                begun, into = self._begun.popleft()
                into.append(self._forward(begun))
            return found[0]

        return logits


def staged(engine: Engine, depth: int) -> PipelineEngine:
    """The same engine over so many stages."""
    engine.runner.submit = Stages(engine.runner.forward).submit
    found = PipelineEngine(engine.runner, engine.scheduler, depth=depth)
    found.speculation = engine.speculation
    return found


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None


def answer_alone(
    model: HistoryModel,
    prompt: list[int],
    params: SamplingParams,
    *,
    eos: frozenset[int] = frozenset(),
    context: int = 4096,
) -> Answer:
    """What a request gets by the textbook loop: one token after the other, no batch, no cache, no scheduler."""
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while True:
        tokens = prompt + output
        row = SampleRow(params, len(tokens), prompt, output)
        [token], [logprob] = sample(torch.from_numpy(model.logits(tokens)).unsqueeze(0), [row])
        output.append(token)
        if logprob is not None:
            logprobs.append(logprob)
        wanted = logprobs if params.logprobs is not None else None
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            return Answer(output, "stop", wanted)
        if len(output) == params.max_tokens or len(prompt) + len(output) >= context:
            return Answer(output, "length", wanted)


def collect(engine: Engine, *, max_steps: int = 3000) -> dict[str, Answer]:
    """Steps until idle; everything that came out, checked to come in order."""
    answers: dict[str, Answer] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return answers
        take(engine.step(), answers)
    raise AssertionError(f"still busy after {max_steps} steps")


def take(outputs, answers: dict[str, Answer]) -> None:
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer([], "", None))
        assert answer.finish_reason == "", "an output behind the last one"
        assert output.offset == len(answer.tokens)
        answer.tokens += output.token_ids
        answer.finish_reason = output.finish_reason or ""
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            answer.logprobs = (answer.logprobs or []) + output.logprobs


def request(name: str, prompt: list[int], *, root: bytes = ROOT, prefill_only: bool = False, **sampling) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    return Request(name, list(prompt), len(prompt), params, root, prefill_only=prefill_only)


def random_prompt(seed: int, length: int, vocab: int = 32) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


__all__ = [
    "BLOCK_TOKENS",
    "Answer",
    "HistoryModel",
    "answer_alone",
    "collect",
    "make_engine",
    "random_prompt",
    "request",
    "staged",
    "take",
]
