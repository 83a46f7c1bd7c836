"""Which tokens of which requests the next step computes.

There are no phases: each request has tokens it knows and tokens it has computed, and a step lets the second catch up
with the first within a budget. Chunked prefill, prefix hits, drafts under verification and resumed requests are one
case.

Batch requests stand behind all real-time ones, among those that wait and among those that run::

    running   [ real-time, in order of admission | batch, in order of admission ]
    waiting   [ real-time, in order of arrival   | batch, in order of arrival   ]

So the last of ``running`` is who makes way for real-time requests. What a step has room for beside real-time rows,
:mod:`.sharing` says; batch rows that find none keep their blocks and go on later. Among requests of one kind accounts
have turns (:mod:`.turns`).
"""

from __future__ import annotations

from collections import deque

from serve_app.costs.pace import Pace
from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from serve_app.engine.branches import name_at, seal_tail
from serve_app.engine.drafts import accept, append
from serve_app.engine.request import FINISH_STOP, Request, Status, unbroken
from serve_app.engine.reuse import reuse
from serve_app.engine.scores import scorable, told, untold
from serve_app.engine.sharing import Room, Sharing, comes, kind, put, realtime
from serve_app.engine.state_slots import Stateless
from serve_app.engine.step import Copy, Load, Prefix, Sampled, Scheduled, Step, StepOutput
from serve_app.kv.keys import extended_root


class Scheduler:
    def __init__(
        self,
        blocks: BlockPool,
        *,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 64,
        max_model_len: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.blocks = blocks
        self.states = Stateless()
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = min(max_model_len, (blocks.num_blocks - 1) * BLOCK_TOKENS)
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._prefixes: dict[str, Prefix] = {}
        self.sharing = Sharing()
        self.pace = Pace()
        self.preemptions = 0
        # Models with a second set of rotary frequencies: the length beyond which a text has them (None: no such model),
        # and whether a text that grows beyond it is computed anew.
        self.extend_at: int | None = None
        self.recompute = False
        # Rows of a step that may tell log-probabilities of prompts; see `serve_app.engine.scores`.
        self.score_rows = 256
        # Requests that a step lets generate; the others keep their blocks and go on later.
        self.rows = max_num_seqs

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def step_tokens(self) -> int:
        return self.pace.tokens(self.max_batch_tokens, least=self.max_num_seqs)

    @property
    def queued_tokens(self) -> int:
        """Known tokens that are still to be computed: neither in a block nor stored where they can be copied from."""
        return self.queued_of([*self.running, *self.waiting])

    def queued_of(self, requests: list[Request]) -> int:
        """The same of some requests."""
        total = 0
        for request in requests:
            prefix = self._prefixes.get(request.id)
            total += max(0, len(request.tokens) - 1 - (prefix.end if prefix is not None else request.computed))
        return total

    @property
    def has_batch(self) -> bool:
        return bool((self.running and self.running[-1].batch) or (self.waiting and self.waiting[-1].batch))

    @property
    def shares(self) -> bool:
        """Whether what steps take is wanted, since requests of different worth or turns are here."""
        return self.has_batch or any(r.paused for r in self.waiting)

    @property
    def drafted_for(self) -> list[Request]:
        """The running requests that tokens are drafted for: batch requests beside real-time ones have no room."""
        if not self.has_batch:
            return self.running
        others = any(requests and not requests[0].batch for requests in (self.running, self.waiting))
        return self.running[: realtime(self.running)] if others else self.running

    def add(self, request: Request, prefix: Prefix | None = None) -> None:
        """Queues a request. ``prefix`` is stored K/V to copy in when the request is admitted."""
        if not request.tokens:
            raise ValueError("a request needs at least one token")
        if request.known + 1 > self.max_model_len:
            raise ValueError(f"{request.known} tokens do not fit a context of {self.max_model_len}")
        if request.score_end:
            prefix = None  # what is copied tells nothing
        if self._outgrown(request, request.tokens if self.recompute else request.tokens[: request.prompt_len]):
            self._extend_rotation(request)
            prefix = None
        if prefix is not None:
            self._prefixes[request.id] = prefix
        if request.sampling.min_tokens:
            request.early = request.sampling.going_on(self.eos_token_ids)
        self.sharing.turns.waits(request)
        put(self.waiting, request)

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out and frees its blocks at once."""
        for request in [*self.running, *self.waiting]:
            if request.id == request_id:
                self._finish(request)
                return request
        return None

    def next(self) -> Step:
        """Chooses the next step's work: what runs goes on first, then waiting requests in order of arrival; batch
        requests come behind all others, as far as there is room.
        """
        step = Step()
        if not self.has_batch:
            self._go_on(self.running, step)
            self._let_in(step)
            return step
        sharing, own = self.sharing, realtime(self.running)
        self._go_on(self.running[:own], step)
        # Where real-time requests take each place that comes free, batch requests would never have one.
        first = sharing.entitled and own == len(self.running)
        if not first:
            self._let_in(step)
        step.beside = any(requests and not requests[0].batch for requests in (self.running, self.waiting))
        room = sharing.room(step, step.beside, max(r.share or 0.0 for r in (*self.running, *self.waiting)))
        self._go_on(self.running[realtime(self.running) :], step, room)
        if first or not self.waiting or self.waiting[0].batch:
            self._let_in(step, room)
        if first:
            self._let_in(step)
        sharing.took(room)
        return step

    def _go_on(self, requests: list[Request], step: Step, room: Room | None = None) -> None:
        """Lets running requests compute what they can; ``room``: of batch requests, for which there is so much."""
        # Those that generate come before those that still prefill, so that a long prompt delays nobody's next token.
        order = sorted(requests, key=lambda r: r.pending > 1 + len(r.draft))
        wanted = [self._blocks_wanted(r) for r in order]
        owed, most = sum(wanted), self.step_tokens
        budget = most - step.tokens
        for index, request in enumerate(order):
            owed -= wanted[index]
            if request.status is not Status.RUNNING or budget <= 0 or request.pending == 0 or request.held:
                continue
            if len(step.scheduled) >= self.rows and request.pending == 1 + len(request.draft):
                continue
            self._trim_draft(request, budget - (len(order) - 1 - index), owed)
            count = scorable(request, request.computed, min(request.pending, budget), self.score_rows - step.scores)
            if room is not None and not (count := room.fitting(request, request.computed, count)):
                request.draft.clear()
            count = unbroken(request, request.computed, self.states.cut(request, request.computed, count))
            if count == 0 or not self._extend(request, request.computed + count, step):
                continue
            if room is not None:
                room.take(request, request.computed, count)
            step.add(self._schedule(request, count))
            budget = most - step.tokens

    def _let_in(self, step: Step, room: Room | None = None) -> None:
        """Admits waiting requests: real-time ones, in the place of batch requests if need be; with ``room``, these."""
        budget, batch = self.step_tokens - step.tokens, room is not None
        waiting = kind(self.waiting, batch) if self.waiting else []
        while waiting and budget > 0 and not step.preempted and not (batch and step.yielded):
            heads = self.sharing.turns.order(waiting, kind(self.running, batch))
            request = heads[0]
            if batch:
                request.name_blocks(len(request.tokens) - 1)
                if comes(request, self.running, self.blocks):
                    waiting.remove(request)
                    continue
            if len(self.running) >= self.max_num_seqs:
                found = next((r for r in heads if self._displace(r, step)), None)
                if found is None:
                    break
                request = found
            waiting.remove(request)
            count = self._admit(request, budget, step, room)
            if count == 0:
                break
            self.waiting.remove(request)
            put(self.running, request)
            step.add(self._schedule(request, count))
            budget -= count

    def commit(self, step: Step, sampled: list[Sampled]) -> list[StepOutput]:
        """Takes over what the step computed; ``sampled`` is aligned with ``step.scheduled``."""
        outputs = []
        for item, result in zip(step.scheduled, sampled, strict=True):
            request = item.request
            if request.status is not Status.RUNNING:
                continue
            if result.scores is not None:
                request.scored += item.scores
                request.scores.append(result.scores)
            if not item.samples:
                request.computed += self.states.close(request, item.count, 0)
                self._seal(request)
                if request.prefill_only and request.pending == 0:
                    seal_tail(request, self.blocks)
                    self.states.keep(request, name_at(request, request.computed))
                    request.finish_reason = FINISH_STOP
                    self._finish(request)
                    outputs.append(StepOutput(request.id, 0, [], FINISH_STOP, cached=request.cached))
                continue
            accepted = accept(request.draft, result.token_ids)
            request.computed += self.states.close(request, item.count, len(request.draft) - accepted)
            request.verified(accepted)
            new = append(
                request, result.token_ids[: accepted + 1], result.finish_reason, self.eos_token_ids, self.max_model_len
            )
            self._seal(request)
            outputs.append(
                StepOutput(
                    request.id,
                    request.output_len - len(new),
                    new,
                    request.finish_reason,
                    result.logprobs[: len(new)] if result.logprobs is not None else None,
                    request.cached,
                    result.error,
                    told(request),
                )
            )
            if request.finish_reason is not None:
                self._finish(request)
            elif self.recompute and self._outgrown(request, request.tokens):
                # It has outgrown the rotation of its K/V: back to the queue's head, to be computed anew.
                self._extend_rotation(request)
                self._put_back(request)
        return outputs

    def _outgrown(self, request: Request, tokens: list[int]) -> bool:
        return self.extend_at is not None and not request.extended and len(tokens) > self.extend_at

    def _extend_rotation(self, request: Request) -> None:
        """From here on the request's K/V are others than those of shorter texts, and so are their names."""
        request.extended = True
        request.root, request.keys = extended_root(request.root), []

    def _schedule(self, request: Request, count: int) -> Scheduled:
        reaches_end = request.computed + count == request.known and not request.prefill_only
        samples = 1 + len(request.draft) if reaches_end else 0
        self.states.open(request)
        return Scheduled(request, request.computed, count, samples, scores=untold(request, request.computed, count))

    def _admit(self, request: Request, budget: int, step: Step, room: Room | None) -> int:
        """Gives a waiting request its cached blocks and room for a first chunk, whose tokens it returns."""
        # At least the last token is computed: its logits are wanted, or (prefill only) a step is what ends the request.
        # So is every token whose row has something to tell of the prompt.
        reusable = len(request.tokens) - 1 if request.scored >= request.score_end else request.scored
        request.name_blocks(reusable)
        prefix = self._prefixes.get(request.id)
        reused = reuse(request, reusable, prefix, self.blocks, self.states)
        start, hits = reused.start, reused.hits
        count = scorable(request, start, min(len(request.tokens) - start, budget), self.score_rows - step.scores)
        if room is not None:
            count = room.fitting(request, start, count)
        if (count := unbroken(request, start, self.states.cut(request, start, count))) == 0:
            return 0
        self.blocks.take(reused.taken)
        missing = blocks_for(start + count) - len(hits)
        while not self.blocks.can_allocate(missing):
            if not self._displace(request, step):
                self.blocks.release(reused.taken)
                return 0
        if room is not None:
            room.take(request, start, count)
        request.blocks = hits + self.blocks.allocate(missing)
        step.copies += [Copy(request, block, request.blocks[len(hits)]) for block in reused.tail]
        self.blocks.release(reused.tail)
        request.sealed = len(hits)
        request.computed = start
        request.status = Status.RUNNING
        self.states.begin(request, reused.state)
        self.sharing.turns.goes_on(request, start, self.sharing.costs)
        if prefix is not None:
            del self._prefixes[request.id]
            if reused.stored:
                self.states.bring(request)
                step.loads.append(Load(request, prefix, len(hits) * BLOCK_TOKENS, start))
        if request.preemptions == 0:
            request.cached = min(start, request.prompt_len)
        return count

    def _blocks_wanted(self, request: Request) -> int:
        """Blocks that the request's next step needs beside those it has, drafts left aside."""
        tokens = min(len(request.tokens), request.computed + self.max_batch_tokens)
        return max(0, blocks_for(tokens) - len(request.blocks))

    def _trim_draft(self, request: Request, budget: int, owed: int) -> None:
        """Drafts are optional work: they take neither the token nor the ``owed`` blocks of those whose turn is
        later.
        """
        if self.recompute and self.extend_at is not None and not request.extended:
            del request.draft[max(0, self.extend_at - len(request.tokens)) :]
        without = request.pending - len(request.draft)
        del request.draft[max(0, budget - without) :]
        if request.draft and not self.blocks.can_allocate(blocks_for(request.known) - len(request.blocks) + owed):
            request.draft.clear()

    def _extend(self, request: Request, tokens: int, step: Step) -> bool:
        """Makes room for ``tokens`` tokens, preempting the latest comers. False: ``request`` itself had to go, or waits
        for a step of another that will.
        """
        while not self.blocks.can_allocate(missing := blocks_for(tokens) - len(request.blocks)):
            victim = self.sharing.turns.latest(kind(self.running, self.running[-1].batch))
            if victim.under_way:
                return False
            self._preempt(victim, step, yields=victim.batch and not request.batch)
            if victim is request:
                return False
        if missing > 0:
            request.blocks += self.blocks.allocate(missing)
        return True

    def _displace(self, request: Request, step: Step) -> bool:
        """Somebody gives place and blocks to ``request``: the latest batch request to one that is none, or one of an
        account that has more of them. False: nobody has to.
        """
        batch = kind(self.running, True)
        if not request.batch and len(batch) > int(self.sharing.entitled):
            if batch[-1].under_way:
                return False
            self._preempt(batch[-1], step, yields=True)
            return True
        victim = self.sharing.turns.makes_way(request, batch if request.batch else kind(self.running, False))
        if victim is not None:
            self._preempt(victim, step, yields=True, paused=True)
        return victim is not None

    def _preempt(self, request: Request, step: Step, *, yields: bool, paused: bool = False) -> None:
        """Back to the queue's head, to be recomputed, mostly from the prefix cache. ``yields``: others come first, and
        it is not that blocks are too few; ``paused``: since it is another account's turn."""
        self._put_back(request, paused=paused)
        self.preemptions += 1
        if yields:
            step.yielded += 1
        else:
            step.preempted += 1
        step.drop(request)

    def _put_back(self, request: Request, *, paused: bool = False) -> None:
        self.running.remove(request)
        self.blocks.release(request.blocks)
        self.states.release(request)
        request.blocks = []
        request.computed = request.sealed = 0
        request.draft.clear()
        request.status = Status.WAITING
        request.preemptions += 1
        self.sharing.turns.waits(request, paused=paused)
        at = realtime(self.waiting) if request.batch else 0
        while paused and at < len(self.waiting) and self.waiting[at].paused:
            at += 1
        self.waiting.insert(at, request)

    def _seal(self, request: Request) -> None:
        """Names the blocks that have become full."""
        full = request.computed // BLOCK_TOKENS
        request.name_blocks(request.computed)
        for index in range(request.sealed, full):
            self.blocks.seal(request.blocks[index], request.keys[index])
        request.sealed = max(request.sealed, full)
        self.states.keep(request)

    def forget_cache(self) -> None:
        self.blocks.clear_cache()
        self.states.clear()

    def _finish(self, request: Request) -> None:
        self.blocks.release(request.blocks)
        self.states.release(request, ended=True)
        request.blocks = []
        request.draft.clear()
        request.status = Status.FINISHED
        self._prefixes.pop(request.id, None)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
