"""Puts an engine together from a model directory and a few numbers. Used by the workers, the tests and the
benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from serve_app.costs.pace import Pace
from serve_app.costs.states import share_out, slot_bytes
from serve_app.engine.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from serve_app.engine.engine import Engine
from serve_app.engine.gpu.graphs import DecodeGraphs
from serve_app.engine.gpu.memory import measure
from serve_app.engine.gpu.overlap import OverlapEngine
from serve_app.engine.pipeline import PipelineEngine
from serve_app.engine.runner import Runner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.scores import score_rows
from serve_app.engine.state_slots import StateSlots
from serve_app.kernels.gpu.backend import operators

# Tokens of a step that go through layers one by one.
PIECE = 64
# Of each text, where blocks hold nothing and nothing else bounds its length.
NAMED_TOKENS = 1 << 17

if TYPE_CHECKING:
    from serve_app.engine.kv_cache import KVShape
    from serve_app.models.load import CausalModel


@dataclass(slots=True)
class EngineLimits:
    """How much an engine takes on. ``kv_cache_bytes`` 0 means: room for ``max_num_seqs`` contexts of moderate
    length. ``reserved_blocks`` come on top of it, for a feature that takes them when it is plugged in.
    """

    kv_cache_bytes: int = 0
    max_batch_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int = 4096
    reserved_blocks: int = 0
    # On a GPU only: decode as CUDA graphs; schedule a step while the one before runs.
    graphs: bool = True
    overlap: bool = True
    # Slots of states, of models whose layers keep any; 0: as many as the budget holds.
    state_slots: int = 0
    # Of a pipeline's steps at a time; 0: as many as it has stages.
    under_way: int = 0
    # Seconds between tokens that steps keep to, as a mean.
    itl_s: float | None = None


def num_blocks(limits: EngineLimits, block_bytes: int) -> int:
    """Blocks that the byte budget holds; without a budget at least enough for one full context."""
    least = blocks_for(limits.max_model_len) + 1
    if not block_bytes:  # layers that keep states alone: blocks are names
        return limits.max_num_seqs * blocks_for(min(limits.max_model_len, NAMED_TOKENS)) + 1
    if limits.kv_cache_bytes:
        return max(limits.kv_cache_bytes // block_bytes, 2)
    return max(least, limits.max_num_seqs * blocks_for(min(limits.max_model_len, 1024)) + 1)


def with_states(limits: EngineLimits, shape: KVShape) -> EngineLimits:
    """``limits`` with slots for a model whose layers keep states, which take their part of the cache's budget. Raises
    :class:`~serve_app.costs.states.NoRoom`.
    """
    size, budget = shape.slot_bytes, limits.kv_cache_bytes
    if not size or limits.state_slots:
        return limits
    slots = share_out(budget, size, limits.max_num_seqs, alone=not shape.layers)
    left = budget - slot_bytes(slots.count, size) if budget else 0
    return replace(limits, state_slots=slots.count, max_num_seqs=slots.texts, kv_cache_bytes=left)


def gpu_cache_bytes(model: CausalModel, limits: EngineLimits, utilization: float, media: int = 0) -> int:
    """Bytes for the cache of ``model`` if it may use ``utilization`` (0..1) of its GPU; measured, see
    :mod:`serve_app.engine.gpu.memory`. ``media``: bytes that pictures and sounds need beside steps. What was found goes
    into the model's report.
    """
    length = min(limits.max_model_len, model.max_model_len)
    budget = measure(
        model.forward, model.kv_shape, model.device, max_batch_tokens=limits.max_batch_tokens,
        max_num_seqs=limits.max_num_seqs, max_model_len=length, chooses=model.chooses,
    )  # fmt: skip
    budget = replace(budget, media=media)
    model.report |= {"media_mb": media >> 20, "held_mb": budget.held >> 20, "activations_mb": budget.activations >> 20}
    return budget.cache_bytes(utilization, (blocks_for(length) + 1) * model.kv_shape.block_bytes)


def reads_lengths_on_device(device: torch.device) -> bool:
    """Whether a pass on ``device`` can be recorded: torch's own paged attention asks for lengths on the host, and
    under a graph it would gather every request's whole context window.
    """
    return operators(device).name != "torch"


def known_tokens(model: CausalModel) -> int:
    """How many tokens ``model`` has embeddings of; where it does not tell, those that it has logits of."""
    try:
        table = model.module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return model.vocab_size
    return getattr(table, "num_embeddings", model.vocab_size)


def record_steps(runner: Runner, max_num_seqs: int, max_model_len: int) -> None:
    """Has steps of answers recorded as graphs, on all ranks of a worker that has several."""
    forward: Any = runner.forward
    of_ranks = getattr(forward, "with_graphs", None)
    if of_ranks is None:
        graphs = DecodeGraphs(forward, runner.kv, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    else:
        graphs = of_ranks(runner.kv, max_num_seqs, max_model_len)
    if graphs is not None:
        runner.forward, runner.prepare, runner.between_steps = graphs, graphs.prepare, graphs.prepare_when_due


def engine_over(runner: Runner, scheduler: Scheduler, *, under_way: int = 0, ahead: bool = False) -> Engine:
    """``under_way``: see :class:`EngineLimits`; ``ahead``: on a device that runs beside the host."""
    stages = getattr(runner.forward, "stages", 1)
    depth = under_way or stages
    if stages > 1 and depth > 1:
        runner.submit = runner.forward.submit  # type: ignore[attr-defined]
        return PipelineEngine(runner, scheduler, depth=depth)
    return OverlapEngine(runner, scheduler) if ahead else Engine(runner, scheduler)


def build_engine(model: CausalModel, limits: EngineLimits, wire: Callable[[Engine], None] | None = None) -> Engine:
    """An engine over ``model`` with its cache allocated; ``wire`` may plug features in."""
    limits = with_states(limits, model.kv_shape)
    slots = limits.state_slots
    if slots:
        model.report |= {"state_bytes": model.kv_shape.states.bytes, "states": slots, "texts": limits.max_num_seqs}
    count = num_blocks(limits, model.kv_shape.block_bytes)
    model.report["kv_cache_tokens"] = (count - 1) * BLOCK_TOKENS
    scheduler = Scheduler(
        BlockPool(count + limits.reserved_blocks),
        max_batch_tokens=limits.max_batch_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=min(limits.max_model_len, model.max_model_len, (count - 1) * BLOCK_TOKENS),
        eos_token_ids=model.eos_token_ids,
    )
    scheduler.pace = Pace(limits.itl_s)
    scheduler.score_rows = score_rows(model.vocab_size)
    scheduler.extend_at, scheduler.recompute = model.extend_at, model.recompute
    runner = Runner(model.forward, model.kv_shape.allocate(count + limits.reserved_blocks, model.device, slots))
    if slots:
        scheduler.states = StateSlots(slots, limits.max_num_seqs, PIECE if model.kv_shape.states.single else 0)
    # The rotation of a text is known on the host alone, and may change with its length; and so is which rows go through
    # layers with states, and through indexers, together.
    fixed = model.extend_at is None and not slots and not model.chooses and model.device.type == "cuda"
    if limits.graphs and fixed and reads_lengths_on_device(model.device):
        record_steps(runner, limits.max_num_seqs, scheduler.max_model_len)
    engine = engine_over(runner, scheduler, under_way=limits.under_way, ahead=limits.overlap and fixed)
    engine.rules = model.rules
    engine.vocab_size = known_tokens(model)
    if wire is not None:
        wire(engine)
    return engine
