"""The policies that a trace is replayed with, each with the variants of which the best counts."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.trace.peers import KVAware
from benchmarks.trace.product import Product
from benchmarks.trace.requests import BLOCK
from benchmarks.trace.simulate import Policy
from benchmarks.trace.spec import ClusterSpec
from serve_app.routing.prices import RouterConfig
from serve_app.routing.types import Role

OVERLAP_WEIGHTS = (1.0, 2.0, 4.0, 8.0, 1000.0)
CHUNKS = (8192, 4096, 2048)
# Steps' worth of prompts queued on every worker from which on the KV-aware router holds requests back; 0: never.
QUEUES = (0.0, 1.0)
EXPLAINED = {
    "product": "one shared pool, roles moved by the planner, prefill and decode chosen together",
    "blind": "the product without knowing which worker has a request's adapter",
    "zoneless": "the product without knowing zones",
    "unlimited": "the product with a pool that never evicts",
    "mixed": "the product's router and shared pool, every worker does both",
    "split": "the product's router and shared pool, fixed roles; the best of all splits at each rate",
    "kv": "a KV-aware router with exact knowledge over per-worker caches, mixed workers; the best of "
    f"overlap weights {', '.join(f'{w:g}' for w in OVERLAP_WEIGHTS)} at each rate",
    "kv-tuned": "the same at its best of overlap weights 1, 4, 1000, of prompt tokens a step "
    f"{', '.join(map(str, CHUNKS))}, with and without its queue of the shortest first",
    "kv-split": "the same router before prefill workers that share all of the cache, and workers that only decode, at "
    "its best split",
}
POLICIES = tuple(EXPLAINED)


def variants(name: str, spec: ClusterSpec, *, admitted: bool = False) -> list[str]:
    """The runs that stand behind one policy's name. ``admitted``: ours may refuse as the product does, too."""
    n = spec.workers
    shares = sorted({min(n - 1, max(1, round(n * k / 8))) for k in range(1, 8)})
    if name == "kv":
        return [f"kv:{weight:g}" for weight in OVERLAP_WEIGHTS]
    if name == "kv-tuned":
        weights = (1000.0, 4.0, 1.0)
        return [f"kv:{weight:g}:{chunk}:{queue:g}" for queue in QUEUES[::-1] for chunk in CHUNKS for weight in weights]
    if name == "kv-split":
        return [f"kv:1000:{CHUNKS[0]}:{queue:g}:{k}" for k in reversed(shares) if k >= 2 for queue in QUEUES[::-1]]
    if name == "split":
        return [f"split:{k}" for k in shares]
    if name == "mixed" and admitted:
        return ["mixed:admit", "mixed"]
    return [name]


def build(name: str, spec: ClusterSpec, seed: int) -> Policy:
    """The policy of one variant."""
    kind, *values = name.split(":")
    base = RouterConfig(chunk_tokens=BLOCK, own_cache=False, early_handover=spec.early_handover, seed=seed)
    mixed: list[Role] = ["mixed"] * spec.workers
    if kind == "product":
        return Product("product", spec, router=base)
    if kind == "blind":
        return Product("blind to adapters", spec, router=base, blind=True)
    if kind == "zoneless":
        return Product("zoneless", spec, router=base, zoned=False)
    if kind == "unlimited":
        return Product("unlimited pool", spec, router=base, blocks=10**9)
    if kind == "mixed":
        admit = bool(values)
        called = "all mixed, pool" + ", admission" * admit
        return Product(called, spec, router=replace(base, split=False), roles=mixed, admit=admit)
    if kind == "split":
        k = int(values[0])
        roles: list[Role] = ["prefill"] * k + ["decode"] * (spec.workers - k)
        router = replace(base, strict_roles=True)
        return Product(f"split {k}P{spec.workers - k}D, pool", spec, router=router, roles=roles, admit=False)
    if kind == "kv":
        weight, chunk, queue, prefill = (*map(float, values), *(0.0,) * (4 - len(values)))
        return KVAware(spec, weight, chunk=int(chunk) or None, queue=queue, prefill=int(prefill))
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
