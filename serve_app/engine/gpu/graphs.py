"""Decode steps as CUDA graphs: one launch instead of hundreds, one graph per size of the batch.

A graph replays the same kernels on the same addresses. So every batch is copied into static buffers, and rows up to the
graph's size are padded with a token that reads and writes the trash block only::

    batch of 3, graph of 4      input_ids  [ 17 | 230 | 5 | 0 ]       slots      [ 96 | 410 | 71 | 0 (trash) ]
                                seq_lens   [  9 |  88 | 8 | 1 ]       tables     [ ..          | 0 0 0       ]

Graphs are captured when they are first of use, largest first: the largest serves every smaller batch until that has a
graph of its own, and the smaller ones reuse its memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS, TRASH_BLOCK, blocks_for
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.runner import Forward
from serve_app.engine.step import Batch

log = logging.getLogger(__name__)

# Records what a function does on the device and returns what repeats it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
# Capturing may take this share of the time while requests are running.
CAPTURE_SHARE = 0.2


class CudaCapture:
    """Captures into graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream as the current one, hence the outer context. Other threads of the
        # process go on using the device.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            run()
        self._pool = graph.pool()
        return graph.replay


def bucket_sizes(most: int) -> list[int]:
    """Sizes of graphs for up to ``most`` requests, ascending: fine where a row more costs something."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32), most}
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    """A :data:`~serve_app.engine.runner.Forward` that replays graphs where a batch allows it, else calls ``forward``.

    A batch allows it if every request has one token and wants its logits. The logits returned are valid until the next
    call. If a capture fails, ``forward`` serves all batches from then on. Batches with adapters have graphs of their
    own, captured once there is one, so that the others pay nothing for them.
    """

    def __init__(
        self,
        forward: Forward,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture | None = None,
    ) -> None:
        self.forward, self.kv = forward, kv
        self._capture = capture or CudaCapture()
        self._sizes = bucket_sizes(max_num_seqs)
        # By size, of batches without adapters and with.
        self._replay: dict[int, Callable[[], None]] = {}
        self._adapted: dict[int, Callable[[], None]] = {}
        self._adapts = False  # there have been batches with adapters, and these can be captured
        self._refused = False
        self._rows = max_num_seqs  # rows that may hold something else than padding
        self._wanted = False
        self._resume_at = 0.0

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=kv.device)

        self.logits: Tensor | None = None  # of all graphs, [max_num_seqs, vocab] once there is one
        with torch.inference_mode():
            self._static = Batch(
                input_ids=zeros(max_num_seqs),
                positions=zeros(max_num_seqs),
                slots=zeros(max_num_seqs),
                query_start=torch.arange(max_num_seqs + 1, dtype=torch.int32, device=kv.device),
                seq_lens=zeros(max_num_seqs, dtype=torch.int32),
                block_tables=zeros(max_num_seqs, blocks_for(max_model_len), dtype=torch.int32),
                sample_rows=torch.arange(max_num_seqs, device=kv.device),
                max_query_len=1,
                max_seq_len=max_model_len,
                kv=kv,
                adapters=zeros(max_num_seqs),
            )
            self._pad(0)

    def __call__(self, batch: Batch) -> Tensor:
        size = self.choose(batch)
        return self.replay(batch, size) if size else self.forward(batch)

    def choose(self, batch: Batch) -> int:
        """The size of the graph that serves ``batch``; 0: there is none."""
        if not self._allows(batch):
            return 0
        self._wanted = True
        self._adapts |= batch.adapters is not None and not self._refused
        rows, replay = len(batch.seq_lens), self._graphs(batch)
        return next((s for s in self._sizes if s >= rows and s in replay), 0)

    def replay(self, batch: Batch, size: int) -> Tensor:
        """Logits of ``batch`` by the graph of that size, which there is."""
        self._fill(batch)
        self._graphs(batch)[size]()
        assert self.logits is not None
        return self.logits[: len(batch.seq_lens)]

    def _graphs(self, batch: Batch) -> dict[int, Callable[[], None]]:
        return self._replay if batch.adapters is None else self._adapted

    @property
    def captured(self) -> list[int]:
        return sorted(self._replay)

    def prepare_when_due(self) -> None:
        """Captures a graph if decode steps have come and capturing has not taken its share of the time yet. Call it
        between two steps, when tokens are out.
        """
        if self.due:
            self.prepare()

    @property
    def due(self) -> bool:
        return self._wanted and time.monotonic() >= self._resume_at

    def prepare(self) -> bool:
        """Captures the largest graph that is missing. False: there is none. Call it whenever the device is idle."""
        found = self.missing()
        if found is None:
            return False
        size, adapted = found
        started = time.monotonic()
        if not self.record(size, adapted=adapted):
            self.refuse(adapted=adapted)
            return False
        self.recorded(started)
        return True

    def missing(self) -> tuple[int, bool] | None:
        """The graph that is to be captured next: its size, and whether it is of batches with adapters."""
        kinds = [(self._replay, False), (self._adapted, True)][: 1 + self._adapts]
        return next(((s, adapted) for replay, adapted in kinds for s in reversed(self._sizes) if s not in replay), None)

    @torch.inference_mode()
    def record(self, size: int, *, adapted: bool = False) -> bool:
        """Captures a graph; False: it failed."""
        self._pad(0)
        static = self._first(size, adapters=adapted)

        try:
            logits = self.forward(static)  # what is compiled or allocated at first use must not be so while recording
            if self.logits is None:
                self.logits = torch.empty_like(logits)
            target = self.logits[:size]

            def run() -> None:
                target.copy_(self.forward(static))

            (self._adapted if adapted else self._replay)[size] = self._capture(run)
        except Exception as error:  # a model that can't be captured is served without graphs
            what = "no CUDA graphs with adapters" if adapted else "no CUDA graphs"
            log.warning("%s: capturing a batch of %d failed: %s", what, size, error)
            return False
        return True

    def recorded(self, started: float) -> None:
        """Notes what a capture that began then (``time.monotonic``) has taken."""
        ended = time.monotonic()
        self._resume_at = ended + (ended - started) * (1 / CAPTURE_SHARE - 1)

    def refuse(self, *, adapted: bool) -> None:
        """Goes on without graphs, or without those of batches with adapters."""
        self._adapts, self._refused = False, True
        self._adapted.clear()
        if not adapted:
            self._sizes.clear()
            self._replay.clear()

    def _allows(self, batch: Batch) -> bool:
        return (
            batch.max_query_len == 1
            and len(batch.sample_rows) == len(batch.seq_lens) <= len(self._static.seq_lens)
            and batch.kv is self.kv
            and batch.capture is None
            and batch.embeddings is None
            and batch.axes is None
            and batch.crossing is None
            and batch.block_tables.shape[1] <= self._static.block_tables.shape[1]
        )

    def _fill(self, batch: Batch) -> None:
        rows, static = len(batch.seq_lens), self._static
        if rows < self._rows:
            self._pad(rows)
        static.input_ids[:rows].copy_(batch.input_ids)
        static.positions[:rows].copy_(batch.positions)
        static.slots[:rows].copy_(batch.slots)
        static.seq_lens[:rows].copy_(batch.seq_lens)
        # Columns behind a request's own blocks may be left over from another: its length ends before them.
        static.block_tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if batch.adapters is not None:
            assert static.adapters is not None
            static.adapters[:rows].copy_(batch.adapters)
        self._rows = rows

    def _pad(self, start: int) -> None:
        """Makes every row from ``start`` on that is in use a token of the trash block."""
        rows, static = slice(start, max(start, self._rows)), self._static
        static.input_ids[rows] = 0
        static.positions[rows] = 0
        static.slots[rows] = TRASH_BLOCK * BLOCK_TOKENS
        static.seq_lens[rows] = 1
        static.block_tables[rows] = TRASH_BLOCK
        assert static.adapters is not None
        static.adapters[rows] = 0
        self._rows = start

    def _first(self, size: int, *, adapters: bool = False) -> Batch:
        static = self._static
        assert static.adapters is not None
        return Batch(
            input_ids=static.input_ids[:size],
            positions=static.positions[:size],
            slots=static.slots[:size],
            query_start=static.query_start[: size + 1],
            seq_lens=static.seq_lens[:size],
            block_tables=static.block_tables[:size],
            sample_rows=static.sample_rows[:size],
            max_query_len=1,
            max_seq_len=static.max_seq_len,
            kv=self.kv,
            adapters=static.adapters[:size] if adapters else None,
        )
