"""Rank 0 of a worker <-> its other ranks: one message a step, and what comes before the first.

Hidden states and logits travel by collectives of torch.distributed, and K/V by the node's pool; here are only words.
"""

from __future__ import annotations

import msgspec

from serve_app.wire.message import Message, MessageDecoder
from serve_app.wire.parts import Part


class RankHello(Message, tag="rank-hello:1", frozen=True):
    """Rank -> rank 0: who it is. ``token``: what rank 0 has told it."""

    rank: int
    token: str
    pid: int


class RankMeeting(Message, tag="rank-meeting:2", frozen=True):
    """Rank 0 -> ranks: where the store of the collectives is. ``file``: on one machine, else ""."""

    host: str
    port: int
    file: str


class RankLayer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One layer's part of the cache: ``heads`` of ``all_heads`` K/V heads, from ``first_head`` on, of layer ``layer``
    of the whole model. ``shared``: values are the first columns of keys.
    """

    layer: int
    heads: int
    first_head: int
    all_heads: int
    head_dim: int
    shared: bool = False


class RankStatePart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tensor that a rank keeps of each text; see ``engine.states.StatePart``. ``dtype``: torch's name."""

    layer: int
    kind: str
    number: int
    size: tuple[int, ...]
    dtype: str


class RankRows(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Rows that go through layers with states together; see ``engine.states.Rows``, arrays (int64) as bytes."""

    begin: int
    count: int
    reads: bytes | None
    writes: bytes
    index: bytes | None
    generated: bool


class RankLinear(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A linear that takes adapters, with the outputs and inputs that the whole model has there; ``experts``: how many
    lie in one weight, whose name it is then.
    """

    name: str
    outputs: int
    inputs: int
    experts: int = 0


class RankLoaded(Message, tag="rank-loaded:5", frozen=True):
    """Rank -> rank 0: it has its part of the model. ``read_bytes``: of files; ``held_bytes``: of its weights once they
    were read, before they are packed or rounded.
    """

    rank: int
    layers: tuple[RankLayer, ...]
    read_bytes: int
    held_bytes: int
    seconds: float
    linears: tuple[RankLinear, ...] = ()
    states: tuple[RankStatePart, ...] = ()
    # Behind a state tokens go through some of its layers one by one.
    single: bool = False
    node: str = ""


class RankFailed(Message, tag="rank-failed:1", frozen=True):
    """Rank -> rank 0: it ends."""

    rank: int
    reason: str


class RankState(Message, tag="rank-state:3", frozen=True):
    """Rank -> rank 0, every second: that it is there."""

    rank: int
    pid: int
    memory_bytes: int
    # Seconds since its start, and of these in collectives.
    seconds: float
    together_s: float
    # For how long it has been waiting for others now; 0: it computes.
    waits_s: float = 0.0
    # It has computed, and the seconds of its processor for that.
    steps: int = 0
    busy_s: float = 0.0
    # Bytes of K/V that it has given to pools and taken from them itself.
    given_bytes: int = 0
    taken_bytes: int = 0
    # Of these: that wait for the pool, and chunks that it holds for rank 0.
    waiting_bytes: int = 0
    held_chunks: int = 0


class RankReady(Message, tag="rank-ready:1", frozen=True):
    """Rank -> rank 0: it has come to where all ranks go on together, and whether as hoped."""

    rank: int
    ok: bool


class RankGo(Message, tag="rank-go:1", frozen=True):
    """Rank 0 -> ranks: all have said :class:`RankReady`; whether all of them as hoped."""

    ok: bool


class RankAllocate(Message, tag="rank-allocate:2", frozen=True):
    """Rank 0 -> ranks: make a cache of so many blocks, and so many slots of states. ``numbers``: of its layers in
    chunks; ``whole``: how a chunk in one piece lies.
    """

    blocks: int
    slots: int = 0
    numbers: tuple[int, ...] = ()
    whole: Part = Part(())


class RankStep(Message, tag="rank-step:5", frozen=True):
    """Rank 0 -> ranks: compute this batch; the fields are those of ``engine.step.Batch``, arrays as bytes."""

    input_ids: bytes  # int64
    positions: bytes  # int64
    slots: bytes  # int64
    query_start: bytes  # int32
    seq_lens: bytes  # int32
    block_tables: bytes  # int32, one row a request
    sample_rows: bytes  # int64
    max_query_len: int
    max_seq_len: int
    total_seq_len: int
    decodes: int
    extended: bytes = b""  # bool
    embedded_rows: bytes = b""  # int64
    embedded_values: bytes = b""  # in the model's dtype
    ends: bytes = b""  # int32
    adapters: bytes = b""  # int64
    axes: bytes = b""  # int64, three a token
    captured: tuple[int, ...] = ()  # layers whose hidden states rank 0 wants
    states: tuple[RankRows, ...] | None = None
    graph: int = 0  # the size of the graph that computes it


class RankGraphs(Message, tag="rank-graphs:1", frozen=True):
    """Rank 0 -> ranks: steps of answers may be recorded as graphs, of so many requests and so long at most."""

    max_num_seqs: int
    max_model_len: int


class RankRecord(Message, tag="rank-record:1", frozen=True):
    """Rank 0 -> ranks: record the graph of this size, of batches with adapters or without, and say whether it worked
    (:class:`RankReady`).
    """

    size: int
    adapted: bool


class RankAdapter(Message, tag="rank-adapter:1", frozen=True):
    """Rank 0 -> ranks: put the adapter of these two files into a place, or take out what is there."""

    place: int
    config: bytes = b""
    weights: bytes = b""


class RankExport(Message, tag="rank-export:1", frozen=True):
    """Rank 0 -> ranks: keep your part of these blocks (int32) for the pool, which will ask for the chunk."""

    chunk_id: str
    blocks: bytes


class RankCopyIn(Message, tag="rank-copy-in:2", frozen=True):
    """Rank 0 -> ranks: overwrite your part of these blocks (int32) with what you hold under ``ticket``, from its block
    ``first`` on.
    """

    blocks: bytes
    ticket: int
    first: int


class RankDrop(Message, tag="rank-drop:1", frozen=True):
    """Rank 0 -> ranks: what you hold under these is of no use any more."""

    tickets: tuple[int, ...]


class RankCopy(Message, tag="rank-copy:1", frozen=True):
    """Rank 0 -> ranks: overwrite blocks ``targets`` with ``sources`` (int32), all of which are read first."""

    sources: bytes
    targets: bytes


class RankStateOut(Message, tag="rank-state-out:1", frozen=True):
    """Rank 0 -> ranks: send it your part of the states in this slot."""

    slot: int


class RankStateIn(Message, tag="rank-state-in:1", frozen=True):
    """Rank 0 -> ranks: take your part of the states in this slot, which it sends."""

    slot: int


ToRank = (
    RankMeeting
    | RankGo
    | RankAllocate
    | RankAdapter
    | RankGraphs
    | RankRecord
    | RankStep
    | RankExport
    | RankCopyIn
    | RankDrop
    | RankCopy
    | RankStateOut
    | RankStateIn
)
FromRank = RankHello | RankReady | RankLoaded | RankFailed | RankState

read_to_rank: MessageDecoder[ToRank] = MessageDecoder(ToRank)
read_from_rank: MessageDecoder[FromRank] = MessageDecoder(FromRank)
