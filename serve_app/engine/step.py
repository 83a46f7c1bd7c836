"""The nouns of one engine step, which scheduler, runner, sampling and proposers speak of.

::

    Scheduler.next() -> Step of Scheduled and Load -> build_batch() -> Batch -> logits -> Sampled per Scheduled
        -> Scheduler.commit() -> StepOutput per request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.crossing import Crossing, cross
from serve_app.engine.gpu.staging import to_device
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.positions import place_batch
from serve_app.engine.request import EmbeddedSpan, Request
from serve_app.engine.scores import Scores
from serve_app.engine.states import BatchStates, place_states
from serve_app.kernels.linear.tiles import Tiles
from serve_app.sampling_params import PromptLogprobs, TokenLogprobs


class Prefix(Protocol):
    """K/V of a request's first tokens that lie somewhere else and can be copied in instead of computed."""

    @property
    def begin(self) -> int:
        """The first token covered."""
        ...

    @property
    def end(self) -> int:
        """One past the last token covered."""
        ...

    @property
    def state(self) -> Tensor | None:
        """The states behind that token, of a model that keeps any."""
        ...


@dataclass(slots=True)
class Scheduled:
    """``count`` tokens of ``request`` from ``start`` on; the last ``samples`` rows are sampled, and ``scores`` rows
    from ``first_score`` on tell log-probabilities of the prompt."""

    request: Request
    start: int
    count: int
    samples: int
    scores: int = field(default=0, kw_only=True)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for each of its tokens: it generates, for a real-time request."""
        return self.start + self.count > self.request.prompt_len <= self.start and not self.request.batch

    @property
    def first_score(self) -> int:
        """The first of the rows that tell log-probabilities; those before it have told theirs."""
        return max(0, self.request.scored - self.start)

    @property
    def blocks(self) -> list[int]:
        """The table of blocks that hold the request's K/V."""
        return self.request.blocks

    @property
    def embedded(self) -> list[EmbeddedSpan]:
        """Spans of the request whose embeddings are given."""
        return self.request.embedded

    def token_ids(self) -> list[int]:
        tokens, draft = self.request.tokens, self.request.draft
        stop = self.start + self.count
        if stop <= len(tokens):
            return tokens[self.start : stop]
        return tokens[self.start :] + draft[: stop - len(tokens)]


@dataclass(slots=True)
class Load:
    """Copy ``request``'s stored prefix into its blocks, tokens [start, end), before the step runs."""

    request: Request
    prefix: Prefix
    start: int
    end: int


@dataclass(slots=True)
class Copy:
    """Copy block ``source`` into ``target``, which is ``request``'s own, before anything else of the step."""

    request: Request
    source: int
    target: int


@dataclass(slots=True)
class Step:
    scheduled: list[Scheduled] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    # Requests that had to give their blocks away; batch requests that made way for real-time ones are not among them.
    preempted: int = 0
    yielded: int = 0
    # Batch requests are in it beside others, or have been left out for their sake.
    beside: bool = False
    # Sums over what is scheduled, kept because the scheduler asks for them with each request.
    tokens: int = field(init=False, default=0)
    scores: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = sum(s.count for s in self.scheduled)
        self.scores = sum(s.scores for s in self.scheduled)

    def add(self, item: Scheduled) -> None:
        self.scheduled.append(item)
        self.tokens += item.count
        self.scores += item.scores

    def drop(self, request: Request) -> None:
        """Takes out what was scheduled of ``request``, and its copies."""
        for item in self.scheduled:
            if item.request is request:
                self.tokens -= item.count
                self.scores -= item.scores
        self.scheduled = [s for s in self.scheduled if s.request is not request]
        self.copies = [c for c in self.copies if c.request is not request]

    @property
    def own(self) -> list[Scheduled]:
        """Without batch requests that only ride along."""
        return [s for s in self.scheduled if not s.request.batch] if self.beside else self.scheduled


@dataclass(slots=True)
class Sampled:
    """The sampled tokens of one request's rows, first row first; log-probabilities only where asked for.

    ``finish_reason``: the last of ``token_ids`` ends the request; ``error`` then says why, where it is one.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: str | None = None
    scores: Scores | None = None


@dataclass(slots=True)
class StepOutput:
    """What one engine step produced for one request.

    ``offset`` is the number of output tokens before ``token_ids``; ``cached`` the prompt tokens that were not computed.
    ``prompt_logprobs`` come with the last output, where they were asked for.
    """

    request_id: str
    offset: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached: int = 0
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(slots=True)
class Capture:
    """A batch's wish for hidden states, which whoever runs the forward pass fulfils.

    ``layers`` are indices; wanted is what *enters* each layer (0: the embeddings). The forward sets ``states``
    [T, len(layers), hidden] in the model's dtype, on its device.
    """

    layers: tuple[int, ...]
    states: Tensor | None = None


@dataclass(slots=True)
class InputEmbeddings:
    """Rows of a batch that enter the first layer as ``values`` [E, hidden] instead of their tokens' embeddings.

    ``rows`` [E] int64 ascend; both lie on the batch's device. Values that are several times as wide go on with what is
    added to the rows behind the first layer, the second and so on (:mod:`serve_app.models.deepstack`).
    """

    rows: Tensor
    values: Tensor

    def put_into(self, x: Tensor) -> Tensor:
        """``x`` [T, hidden], the embeddings of all tokens, with these in place."""
        return x.index_copy(0, self.rows, self.values[:, : x.shape[1]].to(x.dtype))

    def feeds(self, layer: int, hidden: int) -> bool:
        """Whether anything is added behind ``layer``."""
        return self.values.shape[1] > (layer + 1) * hidden

    def add_behind(self, layer: int, x: Tensor) -> Tensor:
        """``x`` [T, hidden], the states behind ``layer``, with what is added there."""
        if not self.feeds(layer, x.shape[1]):
            return x
        own = self.values[:, (layer + 1) * x.shape[1] : (layer + 2) * x.shape[1]].to(x.dtype)
        return x.index_copy(0, self.rows, x[self.rows] + own)


@dataclass(slots=True)
class Batch:
    """T tokens of R requests, concatenated; passed as keyword ``batch=`` through the model to the attention function.

    ::

        tokens   | request 0: 3 prompt tokens | request 1: 1 | request 2: 1 + 2 drafts |
        rows       0          1          2      3              4     5     6
        query_start = [0, 3, 4, 7]      sample_rows = [2, 3, 4, 5, 6]

    Query i of a request with q queries is its token ``seq_len - q + i`` and sees no later ones; the K/V of the batch's
    own tokens are written to ``slots`` before anything is attended to.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, what rotary embeddings turn by; see `axes`
    slots: Tensor  # [T] int64, block * 32 + offset
    query_start: Tensor  # [R+1] int32
    seq_lens: Tensor  # [R] int32
    block_tables: Tensor  # [R, max_blocks] int32
    sample_rows: Tensor  # [S] int64, those whose logits are wanted
    max_query_len: int
    max_seq_len: int
    kv: KVCache
    total_seq_len: int = 0  # sum of seq_lens; 0: the host does not know it
    decodes: int = 0  # at least so many requests at the head of the batch have one token
    capture: Capture | None = None
    embeddings: InputEmbeddings | None = None
    extended: Tensor | None = None  # [T] bool: the token's request is longer than the model's original context
    ends: Tensor | None = None  # [T] int32: keys that each row sees, where some see beyond their own position
    crossing: Crossing | None = None  # pictures that layers of their own attend to
    states: BatchStates | None = None  # where the texts' states are, of models that keep any
    axes: Tensor | None = None  # [3, T] int64: time, row and column, where some token's differ (engine.positions)
    adapters: Tensor | None = None  # [T] int64, the adapter of each row, 0 for none; None if no request has one
    # The same as kernels on a device want it, of all rows and of the sampled ones; worked out in each forward pass.
    tiles: Tiles | None = None
    sampled_tiles: Tiles | None = None


def build_batch(scheduled: Sequence[Scheduled], kv: KVCache) -> Batch:
    """Lays the scheduled tokens out as one :class:`Batch` on the device of ``kv``."""
    counts = np.array([s.count for s in scheduled], np.int64)
    starts = np.array([s.start for s in scheduled], np.int64)
    query_start = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])
    row = np.repeat(np.arange(len(scheduled)), counts)
    positions = np.arange(total, dtype=np.int64) - query_start[:-1].astype(np.int64)[row] + starts[row]

    tables = np.zeros((len(scheduled), max(len(s.blocks) for s in scheduled)), np.int32)
    input_ids = np.empty(total, np.int64)
    for index, s in enumerate(scheduled):
        tables[index, : len(s.blocks)] = s.blocks
        input_ids[query_start[index] : query_start[index + 1]] = s.token_ids()
    slots = tables[row, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
    wanted = []
    for index, s in enumerate(scheduled):
        if s.scores:
            first = query_start[index] + s.first_score
            wanted.append(np.arange(first, first + s.scores))
        wanted.append(np.arange(query_start[index + 1] - s.samples, query_start[index + 1]))
    sample_rows = np.concatenate(wanted)
    seq_lens = (starts + counts).astype(np.int32)

    extended = np.array([s.request.extended for s in scheduled])
    turned, axes = place_batch(scheduled, query_start, positions)

    arrays = [input_ids, turned, slots, query_start, seq_lens, tables, sample_rows.astype(np.int64)]
    ids, where, places, borders, lengths, blocks, rows = to_device(arrays, kv.device)
    return Batch(
        input_ids=ids,
        positions=where,
        slots=places,
        query_start=borders,
        seq_lens=lengths,
        block_tables=blocks,
        sample_rows=rows,
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
        total_seq_len=int(seq_lens.sum()),
        decodes=int((np.cumsum(counts > 1) == 0).sum()),
        kv=kv,
        extended=to_device([extended[row]], kv.device)[0] if extended.any() else None,
        embeddings=_embeddings(scheduled, query_start, kv.device) if any(s.embedded for s in scheduled) else None,
        ends=_ends(scheduled, query_start, positions, kv.device),
        crossing=cross(scheduled, query_start, kv.device),
        states=place_states(scheduled, query_start, kv.device) if kv.shape.states.parts else None,
        axes=None if axes is None else to_device([axes], kv.device)[0],
        adapters=_adapters(scheduled, row, kv.device) if any(s.request.adapter for s in scheduled) else None,
    )


def _adapters(scheduled: Sequence[Scheduled], row: np.ndarray, device: torch.device) -> Tensor:
    return to_device([np.array([s.request.adapter for s in scheduled], np.int64)[row]], device)[0]


def _ends(
    scheduled: Sequence[Scheduled], query_start: np.ndarray, positions: np.ndarray, device: torch.device
) -> Tensor | None:
    """Of rows in spans whose tokens see each other; None where there are none."""
    found = None
    for begin, s in zip(query_start.tolist(), scheduled, strict=False):
        for span in s.embedded:
            first, last = max(span.start, s.start), min(span.end, s.start + s.count)
            if span.whole and first < last:
                found = (positions + 1).astype(np.int32) if found is None else found
                found[begin + first - s.start : begin + last - s.start] = span.end
    return None if found is None else to_device([found], device)[0]


def _embeddings(
    scheduled: Sequence[Scheduled], query_start: np.ndarray, device: torch.device
) -> InputEmbeddings | None:
    """The parts of embedded spans that the scheduled tokens cover."""
    rows, values = [], []
    for begin, s in zip(query_start.tolist(), scheduled, strict=False):
        for span in s.embedded:
            first, last = max(span.start, s.start), min(span.end, s.start + s.count)
            if first < last and span.beside is None:
                rows.append(np.arange(begin + first - s.start, begin + last - s.start))
                values.append(span.read()[first - span.start : last - span.start].to(device, non_blocking=True))
    if not rows:
        return None
    return InputEmbeddings(to_device([np.concatenate(rows)], device)[0], torch.cat(values))
