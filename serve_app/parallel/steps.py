"""A step on several ranks: rank 0 says what to compute, all compute it, and rank 0 has the logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.gpu.graphs import DecodeGraphs
from serve_app.engine.host_copy import HostCopy
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.parted import Held, needs, put_parts, take_part
from serve_app.engine.runner import Forward
from serve_app.engine.states import BatchStates, Rows
from serve_app.engine.step import Batch, Capture, InputEmbeddings
from serve_app.parallel.cache import CacheShard, of_whole
from serve_app.parallel.graphs import LedGraphs, can_record, graphs_of, record
from serve_app.parallel.group import Group
from serve_app.parallel.life import Work
from serve_app.parallel.link import Follower, Leader
from serve_app.parallel.shelf import Shelf
from serve_app.parallel.states import States
from serve_app.wire.parts import Part
from serve_app.wire.ranks import (
    RankAdapter,
    RankAllocate,
    RankCopy,
    RankCopyIn,
    RankDrop,
    RankExport,
    RankGo,
    RankGraphs,
    RankMeeting,
    RankRecord,
    RankRows,
    RankStateIn,
    RankStateOut,
    RankStep,
)


class SharedForward:
    """While a model is loaded: every rank calls it with the same batch and gets the whole logits.

    ``local`` computes this rank's part; ``widths`` are :meth:`Group.collect`'s; ``states``: None for a trial, in which
    nobody asks for any.
    """

    def __init__(self, local: Forward, group: Group, widths: list[int], states: States | None = None) -> None:
        self.local, self.group, self.widths, self.states = local, group, widths, states

    def __call__(self, batch: Batch) -> Tensor:
        return self.group.everywhere(self.local(batch), len(batch.sample_rows), self.widths)


class LedForward:
    """Rank 0's: tells the others of each batch. A pass that fails leaves ranks at different places, so that
    ``on_failure`` has to end all of them.
    """

    def __init__(self, shared: SharedForward, leader: Leader, on_failure: Callable[[BaseException], None]) -> None:
        self._shared, self._leader, self._on_failure = shared, leader, on_failure
        # Seconds of all passes, and of these in putting batches into words.
        self.seconds = self.telling_s = 0.0
        self.work = Work()
        # How many passes can be under way.
        self.stages = shared.group.place.pipeline
        self.graphs: LedGraphs | None = None

    def with_graphs(self, kv: KVCache, max_num_seqs: int, max_model_len: int) -> LedGraphs | None:
        """What an engine is given in place of this, if ranks can record steps."""
        if can_record(self._shared.group.place):
            said = RankGraphs(max_num_seqs, max_model_len)
            self.graphs = LedGraphs(self, self._shared.local, kv, self._leader, said)
        return self.graphs

    def __call__(self, batch: Batch) -> Tensor:
        """Logits float32 [S, vocab] of ``batch.sample_rows``."""
        return self.submit(batch)()

    def submit(self, batch: Batch) -> Callable[[], Tensor]:
        """Begins a pass, and gives what waits for its logits: in the order of passes, once or more often."""
        group, widths, states = self._shared.group, self._shared.widths, self._shared.states
        assert states is not None
        with self.counted():
            began = time.perf_counter()
            graph = self.graphs.own.choose(batch) if self.graphs is not None else 0
            self._leader.tell(describe(batch, graph))
            self.telling_s += time.perf_counter() - began
            with self.work.counted():
                if self.graphs is not None and graph:
                    logits = self.graphs.own.replay(batch, graph)
                else:
                    logits = states.compute(self._shared.local, batch)
            complete = states.collecting(batch)
            coming = group.collecting(logits, len(batch.sample_rows), widths)

        def found() -> Tensor:
            with self.counted():
                complete()
                return coming()

        return found

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is done inside is done by all ranks or ends the worker."""
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._on_failure(error)
            raise
        finally:
            self.seconds += time.perf_counter() - began


def describe(batch: Batch, graph: int = 0) -> RankStep:
    """A batch as a message; ``graph``: the size of the one that computes it."""
    rows = values = b""
    if batch.embeddings is not None:
        rows = _bytes(batch.embeddings.rows)
        values = _bytes(batch.embeddings.values.contiguous().view(torch.uint8))
    return RankStep(
        _bytes(batch.input_ids), _bytes(batch.positions), _bytes(batch.slots), _bytes(batch.query_start),
        _bytes(batch.seq_lens), _bytes(batch.block_tables), _bytes(batch.sample_rows), batch.max_query_len,
        batch.max_seq_len, batch.total_seq_len, batch.decodes,
        b"" if batch.extended is None else _bytes(batch.extended), rows, values,
        b"" if batch.ends is None else _bytes(batch.ends), b"" if batch.adapters is None else _bytes(batch.adapters),
        b"" if batch.axes is None else _bytes(batch.axes), () if batch.capture is None else batch.capture.layers,
        None if batch.states is None else tuple(_row(rows) for rows in batch.states.rows), graph,
    )  # fmt: skip


def understand(step: RankStep, kv: KVCache, dtype: torch.dtype) -> Batch:
    """The batch of a message, on the device of ``kv``; ``dtype`` is the model's."""

    def tensor(data: bytes, kind: torch.dtype) -> Tensor:
        return _tensor(data, kind, kv.device)

    lengths = tensor(step.seq_lens, torch.int32)
    embeddings = None
    if step.embedded_rows:
        rows = tensor(step.embedded_rows, torch.int64)
        embeddings = InputEmbeddings(rows, tensor(step.embedded_values, dtype).view(len(rows), -1))
    return Batch(
        input_ids=tensor(step.input_ids, torch.int64),
        positions=tensor(step.positions, torch.int64),
        slots=tensor(step.slots, torch.int64),
        query_start=tensor(step.query_start, torch.int32),
        seq_lens=lengths,
        block_tables=tensor(step.block_tables, torch.int32).view(len(lengths), -1),
        sample_rows=tensor(step.sample_rows, torch.int64),
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        kv=kv,
        total_seq_len=step.total_seq_len,
        decodes=step.decodes,
        extended=tensor(step.extended, torch.bool) if step.extended else None,
        embeddings=embeddings,
        ends=tensor(step.ends, torch.int32) if step.ends else None,
        adapters=tensor(step.adapters, torch.int64) if step.adapters else None,
        axes=tensor(step.axes, torch.int64).view(3, -1) if step.axes else None,
        capture=Capture(step.captured) if step.captured else None,
        states=None if step.states is None else BatchStates([_rows(rows, kv.device) for rows in step.states]),
    )


def _row(rows: Rows) -> RankRows:
    reads, index = (None if each is None else _bytes(each) for each in (rows.reads, rows.index))
    return RankRows(rows.begin, rows.count, reads, _bytes(rows.writes), index, rows.generated)


def _rows(said: RankRows, device: torch.device) -> Rows:
    reads, index = (None if each is None else _tensor(each, torch.int64, device) for each in (said.reads, said.index))
    return Rows(said.begin, said.count, reads, _tensor(said.writes, torch.int64, device), index, said.generated)


def _tensor(data: bytes, kind: torch.dtype, device: torch.device) -> Tensor:
    """Flat, on ``device``."""
    if not data:  # of which torch makes no tensor
        return torch.empty(0, dtype=kind, device=device)
    return torch.frombuffer(bytearray(data), dtype=kind).to(device)


@torch.inference_mode()
def follow(
    link: Follower, shared: SharedForward, own: CacheShard, dtype: torch.dtype, shelf: Shelf, bank: Any = None
) -> None:
    """What a rank beside rank 0 does until rank 0 goes. ``own``: its part of the cache; ``dtype``: the model's;
    ``shelf``: what it has for the pool and from it; ``bank``: of its adapters, where the model takes any.
    """
    group, states = shared.group, shared.states
    assert states is not None
    device = group.device
    runs: list[Held] = []
    owned: list[Held] = []
    whole = Part(())
    graphs: DecodeGraphs | None = None
    kv = own.shape.allocate(1, device)
    while (said := link.next()) is not None:
        if isinstance(said, RankStep):
            batch = understand(said, kv, dtype)
            with link.work.counted():
                if said.graph and graphs is not None:
                    # The next one writes to its logits, which may still be on their way.
                    logits = graphs.replay(batch, said.graph).clone()
                else:
                    logits = states.compute(shared.local, batch)
            states.send(batch)
            group.collect(logits, len(said.sample_rows) // 8, shared.widths)
        elif isinstance(said, RankGraphs):
            graphs = graphs_of(shared.local, kv, said)
        elif isinstance(said, RankRecord) and graphs is not None:
            record(graphs, said, link)
        elif isinstance(said, RankExport) and owned:
            data = take_part(kv, owned, _blocks(said.blocks))
            shelf.give(said.chunk_id, data.numel(), HostCopy(data))
        elif isinstance(said, RankCopyIn) and runs:
            put_parts(kv, runs, _blocks(said.blocks), of_whole(shelf.held(said.ticket), whole), said.first)
        elif isinstance(said, RankDrop) and runs:
            shelf.drop(said.tickets)
        elif isinstance(said, RankCopy):
            kv.copy_within(_blocks(said.sources), _blocks(said.targets))
        elif isinstance(said, RankAdapter):
            if said.weights:
                bank.put(said.place, bank.read(said.config, said.weights))
            else:
                bank.clear(said.place)
        elif isinstance(said, RankStateOut) and own.shape.states.parts and not group.place.part:
            group.send_bytes(kv.state_out(said.slot), 0)
        elif isinstance(said, RankStateIn) and own.shape.states.parts:
            kv.state_in(said.slot, group.take_bytes(own.shape.states.bytes, 0))
        elif isinstance(said, RankAllocate):
            kv = own.shape.allocate(1, device)  # the old one goes before the new one comes
            kv = own.shape.allocate(said.blocks, device, said.slots)
            named = own.numbered(said.numbers)
            runs, owned, whole = named.runs(), named.owned(group.place), said.whole
            shelf.needs = partial(needs, runs)
        elif isinstance(said, (RankMeeting, RankGo)):
            raise RuntimeError(f"rank 0 says {type(said).__name__}, which it does only while a model is loaded")


def _bytes(tensor: Tensor) -> bytes:
    array: Any = tensor.cpu().contiguous().numpy()
    return array.tobytes()


def _blocks(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()
