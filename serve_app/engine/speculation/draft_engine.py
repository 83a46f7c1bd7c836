"""The draft model's side of speculative decoding: keeps its own K/V per sequence and continues them greedily."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from serve_app.engine.blocks import BlockPool, blocks_for
from serve_app.engine.request import Request
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.draft_proposer import DraftQuery
from serve_app.engine.step import Scheduled, build_batch
from serve_app.sampling_params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class _Sequence:
    request: Request
    draft: list[int] = field(default_factory=list)


class DraftEngine:
    """Serves several decode workers at once; sequences it has to forget are asked for again in full. Those that have
    ended are forgotten when it is told so, or, if a worker was lost before, when there is no room.

    Greedy drafts need no probabilities on the wire, and verification stays exact for sampled requests as well
    (see :func:`serve_app.engine.drafts.accept`).
    """

    def __init__(
        self,
        runner: Runner,
        blocks: BlockPool,
        *,
        max_batch_tokens: int = 2048,
        max_model_len: int = 4096,
        places: Mapping[str, int] | None = None,
    ) -> None:
        """``places``: of the draft model's own adapters, by the digest of the target's that each goes with. Raises
        ValueError for a model that can't take back what it has drafted.
        """
        if runner.kv.shape.states.parts:
            raise ValueError(
                "the draft model has layers that keep a state, which can't take back tokens that did not stand; draft "
                "with a model of attention layers alone"
            )
        self._runner = runner
        self._places = places or {}
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_model_len = max_model_len
        # Least recently used first.
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    @torch.inference_mode()
    def propose(self, queries: list[DraftQuery], count: int, over: Sequence[str] = ()) -> dict[str, list[int] | None]:
        """Up to ``count`` tokens for each query. None: unknown sequence, send it whole. Empty: no draft this time.
        Sequences in ``over`` have ended.
        """
        for request_id in over:
            self.forget(request_id)
        answers: dict[str, list[int] | None] = {}
        active: list[_Sequence] = []
        for query in queries:
            sequence = self._update(query)
            if sequence is None:
                answers[query.id] = None
            elif len(sequence.request.tokens) + count < self._max_model_len:
                active.append(sequence)
            else:
                answers[query.id] = []
        budget = self._max_batch_tokens
        ready = []
        for sequence in active:
            if self._catch_up_room(sequence, count, {s.request.id for s in active}):
                ready.append(sequence)
            else:
                answers[sequence.request.id] = []
        for _ in range(count):
            ready = self._step(ready, budget)
        for sequence in active:
            answers.setdefault(sequence.request.id, sequence.draft)
        return answers

    def forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._blocks.release(sequence.request.blocks)

    def _update(self, query: DraftQuery) -> _Sequence | None:
        sequence = self._sequences.get(query.id)
        if sequence is None:
            if query.agreed:
                return None
            sequence = _Sequence(Request(query.id, [], 0, _GREEDY, b"", adapter=self._places.get(query.adapter, 0)))
            self._sequences[query.id] = sequence
        self._sequences.move_to_end(query.id)
        request = sequence.request
        if query.agreed > len(request.tokens):
            self.forget(query.id)
            return None
        request.tokens = request.tokens[: query.agreed] + query.suffix
        request.computed = min(request.computed, query.agreed, len(request.tokens) - 1)
        sequence.draft = []
        return sequence

    def _catch_up_room(self, sequence: _Sequence, count: int, keep: set[str]) -> bool:
        """Blocks for the sequence and ``count`` more tokens, forgetting idle sequences if need be."""
        request = sequence.request
        missing = blocks_for(len(request.tokens) + count) - len(request.blocks)
        for other in list(self._sequences):
            if self._blocks.can_allocate(missing):
                break
            if other not in keep:
                self.forget(other)
        if not self._blocks.can_allocate(missing):
            return False
        if missing > 0:
            request.blocks += self._blocks.allocate(missing)
        return True

    def _step(self, sequences: list[_Sequence], budget: int) -> list[_Sequence]:
        """One forward pass; returns the sequences that have caught up and can go on drafting."""
        scheduled, drafting = [], []
        for sequence in sequences:
            request = sequence.request
            count = min(request.pending, budget)
            if count == 0:
                continue
            budget -= count
            caught_up = count == request.pending
            scheduled.append(Scheduled(request, request.computed, count, 1 if caught_up else 0))
            if caught_up:
                drafting.append(sequence)
        if not scheduled:
            return []
        logits = self._runner.forward(build_batch(scheduled, self._runner.kv))
        tokens = iter(logits.float().argmax(-1).tolist() if drafting else [])
        for item in scheduled:
            item.request.computed += item.count
        for sequence in drafting:
            token = next(tokens)
            sequence.draft.append(token)
            sequence.request.tokens.append(token)
        return drafting
