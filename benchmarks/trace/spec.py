"""The simulated machine: what workers, links and gateways can do, the same for every policy compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.trace.requests import BLOCK

# What every worker of the shipped records of 8B models has, whatever its stage: 12 GiB of cache at 128 KiB a token, and
# sequences.
RECORD_KV_TOKENS = 98_304
RECORD_SEQS = 96


@dataclass(slots=True, frozen=True)
class ClusterSpec:
    """Times in seconds, rates in bytes per second."""

    workers: int = 8
    blocks: int = 46_872  # of cache in all, 512 tokens each
    nodes: int = 1
    kv_tokens: int = 5_859 * BLOCK  # of running sequences, per worker
    max_seqs: int = 256
    chunk: int = 8192  # tokens of a step at most, as the records of 8B models have it
    # Workers of several kinds, in turns: how many times as long a step takes, and the share of ``kv_tokens`` there is.
    gpus: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    kv_token_bytes: int = 131_072  # 8B model, 8 KV heads, bfloat16
    link_bytes_s: float = 50e9  # host memory to GPU: PCIe 5.0 x16 as measured on H100 boards, each direction
    link_latency_s: float = 2e-3
    remote_bytes_s: float = 12.5e9  # into a node from the others: 100 Gbit/s
    zones: int = 1  # nodes lie in so many, one after another; gateways too
    zone_bytes_s: float = 6.25e9  # into a zone from the others: 50 Gbit/s, for all of its nodes
    zone_latency_s: float = 1e-3  # more for each call and transfer between two
    # Workers begin with guesses of the links, so many times what these do, and tell the router, which learns by what
    # fetches take; 0: all know them.
    guessed: float = 0.0
    early_handover: bool = True  # chunks go over while prefill computes, or all at its end
    decode_cost: Literal["mocker", "linear"] = "mocker"  # see benchmarks.trace.engine
    report_s: float = 0.1
    heartbeat_s: float = 2.0
    renew_s: float = 0.5
    call_s: float = 3e-3  # a call by Serve's handle: gateway to decode, decode to prefill
    news_s: float = 1e-3  # a frame over a connection that stands: tokens, ends of streams, load reports
    gateways: int = 1
    owner: bool = True  # one gateway owns the model's dispatch; False: each has one of its own
    adapters: int = 32  # that a worker has in memory
    adapter_bytes: int = 50 << 20
    adapter_bytes_s: float = 1e9  # from the file store to a place in the model
    ttft_target: float = 5.0  # what goodput counts, and what admission holds
    itl_target: float = 0.05

    def gpu(self, worker: int) -> tuple[float, float]:
        """A worker's slowness and its share of ``kv_tokens``."""
        return self.gpus[worker % len(self.gpus)]

    def zone_of(self, node: int) -> int:
        return node * self.zones // self.nodes

    def gateway_zone(self, gateway: int) -> int:
        return gateway * self.zones // self.gateways

    @property
    def largest(self) -> int:
        """Tokens of the largest request that every worker has room for."""
        return int(self.kv_tokens * min(room for _, room in self.gpus))


class Link:
    """One direction of a link: transfers follow one another."""

    __slots__ = ("bytes_s", "free_at", "moved")

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.free_at = 0.0
        self.moved = 0  # bytes since the start

    def take(self, at: float, nbytes: int) -> float:
        """When ``nbytes`` that are ready ``at`` will have passed."""
        self.free_at = max(at, self.free_at) + nbytes / self.bytes_s
        self.moved += nbytes
        return self.free_at

    def waiting(self, now: float) -> float:
        """Bytes that have not passed yet."""
        return max(self.free_at - now, 0.0) * self.bytes_s
