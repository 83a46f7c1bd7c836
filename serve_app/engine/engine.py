"""The engine: schedule, run, commit. Knows nothing of Ray, HTTP or transformers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from serve_app.costs.steps import StepSample
from serve_app.engine.kv_io.transfer import ChunkExporter
from serve_app.engine.meter import StepMeter
from serve_app.engine.request import Request, Status
from serve_app.engine.rules import Rules
from serve_app.engine.runner import Runner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.speculation.speculate import Looked, Speculation
from serve_app.engine.step import Prefix, Sampled, Step, StepOutput


@dataclass(slots=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    busy_seconds: float = 0.0
    # Steps that were under way when each of them was done, itself included, added up.
    under_way: int = 0

    def numbers(self) -> dict[str, float]:
        """For whoever watches a worker."""
        return {
            "steps": self.steps,
            "steps_under_way": round(self.under_way / max(1, self.steps), 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "busy_seconds": round(self.busy_seconds, 3),
        }


class Engine:
    """One model on one device. Not thread-safe: :class:`serve_app.engine.loop.EngineLoop` owns it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        speculation: Speculation | None = None,
        exporter: ChunkExporter | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.speculation = speculation
        self.exporter = exporter
        # What the model's folder asks of each answer, where it asks anything.
        self.rules: Rules | None = None
        # Tokens that the model has embeddings of; None: not known.
        self.vocab_size: int | None = None
        self.stats = EngineStats()
        self.meter = StepMeter()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, prefix: Prefix | None = None, *, held: int | None = None) -> None:
        """Queues a request; ``held`` (tokens the pool has already) turns on exporting what is computed beyond them."""
        if request.sampling.grammar is not None and request.constraint is None:
            raise ValueError("its grammar is not compiled")
        self._refuse_unknown(request)
        if self.rules is not None:
            self.rules.rule(request)
        self.scheduler.add(request, prefix)
        if self.exporter is not None and held is not None:
            self.exporter.begin(request.id, held)

    def _refuse_unknown(self, request: Request) -> None:
        """A step that looks one up fails for every request in it."""
        ids, known = (*request.tokens, *request.asked), self.vocab_size
        if known is None or not ids:
            return
        least, most = min(ids), max(ids)
        if least < 0 or most >= known:
            raise ValueError(
                f"token {least if least < 0 else most} is unknown to the model, which has {known}: its tokenizer has "
                "more; take the one that it was trained with"
            )

    def export_from(self, request_id: str, held: int) -> None:
        """The pool holds only the first ``held`` tokens of a request that :meth:`add` was told more about."""
        if self.exporter is not None and any(
            r.id == request_id for r in (*self.scheduler.running, *self.scheduler.waiting)
        ):
            self.exporter.begin(request_id, held)

    def abort(self, request_id: str, *, export: bool = True) -> bool:
        """Ends a request and frees its blocks at once. False if it is not here.

        What it has computed is exported as if it had ended by itself (a client that stops at a stop string ends it like
        this); without ``export`` nothing is, because the cache cannot be trusted.
        """
        if export and self.exporter is not None:
            for running in [r for r in self.scheduler.running if r.id == request_id]:
                self.exporter.computed(running, running.blocks, running.computed, last=True)
        request = self.scheduler.remove(request_id)
        self._forget(request_id)
        return request is not None

    def step(self) -> list[StepOutput]:
        """Computes one batch and returns what it produced for each request that has something new."""
        self.runner.between_steps()
        started = time.perf_counter()
        if self.speculation is not None:
            self.speculation.before_step(self.scheduler.drafted_for, self.scheduler.max_model_len)
        step = self.scheduler.next()
        if not step.scheduled:
            return []
        self.stats.under_way += 1
        return self._take_over(step, self.runner.run(step), started)

    def _take_over(
        self, step: Step, sampled: list[Sampled], started: float, looked: Looked | None = None
    ) -> list[StepOutput]:
        """Commits what a step computed, hands it to the features and counts it. ``looked``: as
        :meth:`Speculation.after_step` wants it.
        """
        prompt = sum(max(0, min(s.start + s.count, s.request.prompt_len) - s.start) for s in step.scheduled)
        # Commit forgets the blocks of a request that ends, but nobody writes to them before the next step.
        blocks = [s.request.blocks for s in step.scheduled]
        outputs = self.scheduler.commit(step, sampled)
        if self.exporter is not None:
            for item, of_it in zip(step.scheduled, blocks, strict=True):
                ended = item.request.status is Status.FINISHED
                self.exporter.computed(item.request, of_it, item.request.computed, last=ended)
        if self.speculation is not None:
            self.speculation.after_step(step, started, looked)
        seconds = time.perf_counter() - started
        sample = self._measure(step, seconds)
        if self.scheduler.pace.target is not None:
            self._pace(step, outputs, seconds, sample.seconds)
        if self.scheduler.shares:
            self.scheduler.sharing.learn(sample)
        self._count(prompt, outputs, seconds)
        return outputs

    def _measure(self, step: Step, seconds: float) -> StepSample:
        return self.meter.record(step.scheduled, seconds)

    def _pace(self, step: Step, outputs: list[StepOutput], seconds: float, least: float) -> None:
        """Tells the pace what the texts of real-time requests got; prompts that end in a step are no texts yet."""
        texts = {item.request.id for item in step.scheduled if item.awaited}
        given = sum(len(output.token_ids) for output in outputs if output.request_id in texts)
        generated = given / len(texts) if texts else 0.0
        self.scheduler.pace.took(seconds, generated, least=least, waits=self._texts_wait())

    def _texts_wait(self) -> bool:
        """Whether texts are in other steps that are under way."""
        return False

    def _count(self, prompt: int, outputs: list[StepOutput], seconds: float) -> None:
        self.stats.steps += 1
        self.stats.prompt_tokens += prompt
        self.stats.busy_seconds += seconds
        for output in outputs:
            self.stats.generated_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.stats.finished += 1
                self.stats.cached_tokens += output.cached
                self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        if self.runner.observer is not None:
            self.runner.observer.forget(request_id)
        if self.speculation is not None:
            self.speculation.forget(request_id)
        if self.exporter is not None:
            self.exporter.forget(request_id)
