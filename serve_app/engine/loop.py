"""The thread that owns an engine. Others speak to it through a queue of commands and hear from it once per step."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from serve_app.engine.engine import Engine
from serve_app.engine.meter import StepClock
from serve_app.engine.request import FINISH_ERROR, FINISH_REFUSED, Request
from serve_app.engine.step import Prefix, StepOutput

log = logging.getLogger(__name__)
OnOutputs = Callable[[list[StepOutput]], None]


class EngineStopped(RuntimeError):
    """The engine's thread has ended; its cause is chained."""


class EngineLoop:
    """Steps an engine while it has work and sleeps while it has none.

    ``on_outputs`` is called in the engine's thread once per step with everything the step produced. When a step fails,
    all requests are ended with the cause, the cache is emptied and the loop goes on: one bad request must not take the
    others' future with it. Three failures in a row end the loop (``failed`` is set; the replica's health check reads
    it).
    """

    MAX_FAILURES = 3

    def __init__(self, engine: Engine, on_outputs: OnOutputs, name: str = "engine") -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()
        self._failures = 0
        self.failed: BaseException | None = None
        self.steps = 0
        self.clock = StepClock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, request: Request, prefix: Prefix | None = None, *, held: int | None = None) -> None:
        """Queues a request. A request the engine refuses ends with an error output."""

        def command() -> None:
            try:
                self._engine.add(request, prefix, held=held)
            except ValueError as refused:
                self._on_outputs([StepOutput(request.id, 0, [], FINISH_REFUSED, error=str(refused))])

        self._submit(command)

    def abort(self, request_id: str) -> None:
        def command() -> None:
            self._engine.abort(request_id)

        self._submit(command)

    def call(self, function: Callable[[Engine], Any]) -> Future:
        """Runs ``function(engine)`` in the engine's thread between two steps."""
        future: Future = Future()

        def command() -> None:
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._submit(command)
        return future

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the thread after the step in hand; requests still in the engine end with an error."""
        self._commands.put(None)
        self._thread.join(timeout)

    def _submit(self, command: Callable[[], Any]) -> None:
        with self._closing:
            if self._closed or self.failed is not None:
                raise EngineStopped("the engine has stopped") from self.failed
            self._commands.put(command)

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # each thread has an OpenMP setting of its own
        try:
            self._step_until_stopped()
        except Exception as error:
            log.exception("the engine's thread ends")
            self.failed = error
        finally:
            self._close()

    def _close(self) -> None:
        """Nothing is accepted from here on, and what was is answered: nobody may wait for a thread that has ended."""
        with self._closing:
            self._closed = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        outputs = self._fail_all("the engine has stopped")
        try:
            if outputs:
                self._on_outputs(outputs)
        except Exception:
            log.exception("%d requests could not be told that the engine has stopped", len(outputs))

    def _step_until_stopped(self) -> None:
        while self._drain():
            try:
                with self.clock:
                    outputs = self._engine.step()
                self._failures = 0
            except Exception as error:
                log.exception("a step failed and ends all requests in the engine")
                outputs = self._fail_all(f"{type(error).__name__} in the engine")
                self._failures += 1
                if self._failures >= self.MAX_FAILURES:
                    self.failed = error
            self.steps += 1
            if outputs:
                self._on_outputs(outputs)
            if self.failed is not None:
                return

    def _drain(self) -> bool:
        """Runs queued commands, waiting for one while the engine is idle. False: stop."""
        while True:
            try:
                busy = self._engine.has_work or self._engine.runner.prepare()
                command = self._commands.get(block=not busy)
            except queue.Empty:
                if not self._engine.has_work:
                    continue
                return True
            if command is None:
                return False
            command()

    def _fail_all(self, reason: str) -> list[StepOutput]:
        scheduler = self._engine.scheduler
        outputs = []
        for request in [*scheduler.running, *scheduler.waiting]:
            self._engine.abort(request.id, export=False)
            outputs.append(StepOutput(request.id, request.output_len, [], FINISH_ERROR, error=reason))
        # What the failed step wrote is unknown.
        scheduler.forget_cache()
        return outputs
