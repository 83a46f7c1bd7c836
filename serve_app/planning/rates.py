"""Rates by a roofline: a step takes as long as memory needs for the bytes it reads, or the processor for its products,
whichever is longer, and then as long as ranks need to tell each other (Williams et al. 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.costs.stages import rows_of_a_step
from serve_app.parallel.dispatch import dispatched_bytes, reached
from serve_app.planning.devices import Device
from serve_app.planning.model import Model
from serve_app.planning.ranks import WHOLE, Rank, Split

# Shares of the vendors' peak rates that programs reach.
READS = 0.8
MULTIPLIES = 0.6
# Seconds that a collective takes however little it carries.
LATENCY = 10e-6


@dataclass(slots=True, frozen=True)
class Rates:
    """Tokens per second of one replica: one text alone, ``streams`` texts of ``context`` tokens, and prompts."""

    single: float
    streams: int
    context: int
    decode: float
    prefill: float


def rates(model: Model, split: Split, ranks: list[Rank], device: Device, *, streams: int, context: int) -> Rates:
    """Of one replica, whose stages work at the same time, each on a step of its own."""
    alone = sum(stage_seconds(model, split, rank, device, 1, context) for rank in ranks)
    decode = 0.0
    if streams:
        # A text's next step begins when its last one has been through all stages, and all others have had theirs.
        rows = rows_of_a_step(streams, split.pipeline) if split.pipeline > 1 else streams
        steps = -(-streams // rows)
        each = [stage_seconds(model, split, rank, device, min(rows, streams), context) for rank in ranks]
        decode = streams / max(steps * max(each), sum(each))
    products = 2 * model.active_values / (device.flops * MULTIPLIES * split.tensor)
    told = _all_reduce(model.hidden * 2, split.tensor, device) * 2 * len(model.layers)
    if split.travel and split.tensor > 1:
        share = reached(model.experts, model.chosen, split.tensor)
        sent = dispatched_bytes(1, model.hidden * 2, split.tensor, share, routed=8 * model.chosen)
        told = sent / device.link * len(model.layers)
    # Pieces of prompts follow one another: the stage with most to multiply is never idle.
    of_stages = [_products(model, split, rank) for rank in ranks]
    slowest = max(of_stages) / sum(of_stages)
    return Rates(1 / alone, streams, context, decode, 1 / ((products + told) * slowest))


def stage_seconds(model: Model, split: Split, rank: Rank, device: Device, texts: int, context: int) -> float:
    """One step of one stage with one token of each of ``texts``."""
    # Each token chooses by itself: an expert is not read only if none of them has chosen it.
    touched = 1 - (1 - model.chosen / model.experts) ** texts if model.experts else 1.0
    read, values = 0.0, _products(model, split, rank)
    for role, held in rank.weights.items():
        if role == "vision" or (role == "embedding" and not model.tied):
            continue
        read += held * (touched if role == "experts" else 1.0)
    caches = model.caches[rank.first : rank.last]
    read += texts * sum(cache.read_bytes(context, split.tensor) for cache in caches)
    seconds = max(read / (device.bandwidth * READS), 2 * values * texts / (device.flops * MULTIPLIES))
    if split.tensor > 1:
        each = LATENCY + _all_reduce(model.hidden * 2 * texts, split.tensor, device)
        seconds += 2 * len(caches) * each
    return seconds + (LATENCY if split.pipeline > 1 else 0.0)


def _products(model: Model, split: Split, rank: Rank) -> float:
    """Weights that one rank of a stage multiplies each token with."""
    values = 0.0
    for layer in model.layers[rank.first : rank.last]:
        for role, part in layer.items():
            share = model.chosen / model.experts if role == "experts" and model.experts else 1.0
            values += part.values * share / (1 if role in WHOLE else split.tensor)
    return values


def _all_reduce(size: float, ranks: int, device: Device) -> float:
    """Seconds on the wire of a ring (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * size / device.link if ranks > 1 else 0.0
