"""How many bytes of a GPU the K/V cache may take: what one worker's share leaves after weights and activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS, TRASH_BLOCK, blocks_for
from serve_app.engine.kv_cache import KVCache, KVShape
from serve_app.engine.penalties import SampleRow
from serve_app.engine.runner import Forward
from serve_app.engine.sampling import draw_tokens
from serve_app.engine.states import BatchStates, Rows
from serve_app.engine.step import Batch
from serve_app.sampling_params import SamplingParams

# What CUDA graphs, cuBLAS and fragmentation take beside what is counted.
RESERVE = 768 << 20


class NotEnoughMemory(ValueError):
    """The share does not hold weights, activations and a cache; the text gives the sizes and the remedy."""


@dataclass(slots=True, frozen=True)
class Budget:
    """Bytes of a device: all of it, what this process holds before the cache, what a step needs at its peak, and what
    pictures and sounds need beside it.
    """

    total: int
    free: int
    held: int
    activations: int
    media: int = 0

    def cache_bytes(self, utilization: float, least: int) -> int:
        """What is left for the cache if the process may use ``utilization`` (0..1) of the device.

        Raises :class:`NotEnoughMemory` where that is less than ``least``.
        """
        step = self.activations + self.media + RESERVE
        found = min(int(self.total * utilization) - self.held, self.free) - step
        if found < least:
            sizes = (self.total * utilization, self.held, self.activations, self.media, least)
            allowed, held, rows, media, cache = (f"{n / 2**30:.2f} GiB" for n in sizes)
            encoding = f", {media} for pictures and sounds" if self.media else ""
            raise NotEnoughMemory(
                f"{allowed} of the GPU ({utilization:.0%}; {self.free / 2**30:.1f} GiB free) hold {held} of weights "
                f"and {rows} of activations{encoding}, and no cache of {cache}; raise gpu_memory_utilization, or lower "
                "max_batch_tokens or context_window"
            )
        return found


def measure(forward: Forward, shape: KVShape, device: torch.device, *, max_batch_tokens: int, max_num_seqs: int,
            max_model_len: int, chooses: bool = False) -> Budget:  # fmt: skip
    """Runs the largest batch that the limits allow, samples from it, and reads the allocator's counters. CUDA only.
    ``chooses``: a model that chooses keys takes most behind long texts, of which it gets a few rows each, and one many.
    """
    kv = shape.allocate(1, device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        draw_all(forward(largest_batch(kv, max_batch_tokens, max_num_seqs, max_model_len)))
        if kv.shape.states.parts:
            forward(widest_batch(kv, max_num_seqs, max(1, max_batch_tokens // max_num_seqs)))
        if chooses:
            forward(longest_batch(kv, max_num_seqs, 1, max_model_len))
            forward(longest_batch(kv, 1, min(max_batch_tokens, max_model_len), max_model_len))
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - held
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Budget(total, free, held, activations)


def draw_all(logits: Tensor) -> Tensor:
    """Samples every row of ``logits`` [S, V] in the ways that take most memory: penalties, half of the rows drawn from
    the whole vocabulary, half from a part of it, and log-probabilities kept beside. Returns int64 [S].
    """
    logits = logits.float()
    kept = torch.log_softmax(logits, -1)
    rows = []
    for index in range(len(logits)):
        params = SamplingParams(temperature=1.0, top_p=(1.0, 0.9)[index % 2], repetition_penalty=1.1)
        rows.append(SampleRow(params, index, prompt=[0], output=[0]))
    tokens = draw_tokens(logits, rows)
    del kept
    return tokens


def largest_batch(kv: KVCache, max_batch_tokens: int, max_num_seqs: int, max_model_len: int) -> Batch:
    """``max_batch_tokens`` prompt tokens, ``max_num_seqs`` of them sampled, all in the trash block of ``kv``."""
    lengths: list[int] = []
    while sum(lengths) < max_batch_tokens:
        lengths.append(min(max_model_len, max_batch_tokens - sum(lengths)))
    device = kv.device
    positions = torch.cat([torch.arange(n) for n in lengths])
    tables = torch.full((len(lengths), blocks_for(max(lengths))), TRASH_BLOCK, dtype=torch.int32)
    return Batch(
        input_ids=torch.zeros(max_batch_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slots=(TRASH_BLOCK * BLOCK_TOKENS + positions % BLOCK_TOKENS).to(device),
        query_start=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        sample_rows=torch.arange(max_batch_tokens, device=device)[-max_num_seqs:],
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        total_seq_len=sum(lengths),
        kv=kv,
        states=_states(lengths, device) if kv.shape.states.parts else None,
    )


def widest_batch(kv: KVCache, texts: int, rows: int) -> Batch:
    """So many ``rows`` of each of ``texts``, behind the states in slot 0 of ``kv``, all together."""
    batch = largest_batch(kv, texts * rows, texts, rows)
    nobody = torch.zeros(texts, dtype=torch.int64, device=kv.device)
    batch.states = BatchStates([Rows(0, rows, nobody, nobody, torch.arange(texts * rows, device=kv.device))])
    return batch


def longest_batch(kv: KVCache, texts: int, rows: int, length: int) -> Batch:
    """The last ``rows`` of each of ``texts`` that have ``length`` tokens."""
    batch = largest_batch(kv, texts * rows, texts, rows)
    batch.positions = batch.positions + length - rows
    batch.seq_lens = torch.full_like(batch.seq_lens, length)
    batch.block_tables = batch.block_tables.new_full((texts, blocks_for(length)), TRASH_BLOCK)
    batch.max_seq_len, batch.total_seq_len = length, texts * length
    if batch.states is not None:
        nobody = torch.zeros(texts, dtype=torch.int64, device=kv.device)
        batch.states = BatchStates([Rows(0, rows, nobody, nobody, torch.arange(texts * rows, device=kv.device))])
    return batch


def _states(lengths: list[int], device: torch.device) -> BatchStates:
    """Of texts that begin with the batch and write their states to slot 0."""
    nobody, begin, rows = torch.zeros(1, dtype=torch.int64, device=device), 0, []
    for length in lengths:
        rows.append(Rows(begin, length, None, nobody))
        begin += length
    return BatchStates(rows)
