"""Before a model is served: the engine's own pass beside the model's plain one, where the configuration has borders.

The model is built once more, scaled down (:mod:`serve_app.models.loading.miniature`) and with random weights in
float32. Its texts run through a real scheduler, cut into chunks, beside other lengths, after prefix hits and
preemptions, and past every window, chunk, original length and up to the context's end. Each sampled row must have the
logits that transformers' own attention gives for that text alone. The fused decoder is compared in the same way. The
result depends on nothing but the configuration and the code, and is kept for the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.blocks import BlockPool
from serve_app.engine.kv_cache import KVShape
from serve_app.engine.request import Request
from serve_app.engine.runner import Forward, Runner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.state_slots import StateSlots
from serve_app.engine.step import Step
from serve_app.models.latent import has_latents
from serve_app.models.linears import Plug
from serve_app.models.loading import kept
from serve_app.models.loading.adapt import own_attention
from serve_app.models.loading.compare import difference, probe
from serve_app.models.loading.miniature import NotScalable, Sizes, build, scale_down
from serve_app.models.loading.observe import Unservable, parameters_of
from serve_app.models.loading.prepare import Prepared, prepare
from serve_app.sampling_params import SamplingParams

# Borders lie close together, so that few tokens pass all of them; the context ends behind them.
SIZES = Sizes(window=24, chunk=32, original=64, context=160)
NEW_TOKENS = 3
KEPT_STATES = 2
# Root mean square of the difference over that of the logits, both float32.
ALLOWED = 1e-3
# Where transformers itself computes a token alone otherwise than among others.
ALLOWED_STEPWISE = 1e-2


@dataclass(slots=True)
class Verdict:
    """``differs``: why the model can't be served; ``fused_differs``: why not with the fused decoder; empty if it can.
    ``compared``: whether there was anything to compare; without that a model is refused as well.
    """

    differs: str = ""
    fused_differs: str = ""
    compared: bool = True
    # Whether the cache may hold latents of attention; else it holds every head's keys and values.
    latents: bool = True
    seconds: float = 0.0
    cached: bool = False

    def report(self) -> dict[str, Any]:
        """For the model's report."""
        said = self.differs or "agrees with transformers"
        return {"check": said + (" (known)" if self.cached else ""), "check_s": self.seconds}


@dataclass(slots=True)
class Small:
    """What the fused decoder's reader wants of a model."""

    module: nn.Module
    kv_shape: KVShape
    forward: Callable[[Any], Tensor]
    vocab_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


def check(model_class: Any, config: Any) -> Verdict:
    """Compares, or remembers that it has. Never raises for what a model does."""
    started = time.perf_counter()
    if (known := recall(model_class, config)) is not None:
        known.cached, known.seconds = True, round(time.perf_counter() - started, 3)
        return known
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on several
    try:
        verdict = compare(model_class, config)
    finally:
        torch.set_num_threads(threads)
    verdict.seconds = round(time.perf_counter() - started, 2)
    if verdict.compared:  # else the reason may lie in what is not installed
        remember(model_class, config, verdict)
    return verdict


def recall(model_class: Any, config: Any, division: str = "") -> Verdict | None:
    """What an earlier start has found; ``division``: among how many ranks, where it is several."""
    return kept.read(Verdict, model_class.__name__, kept.described(config), division)


def remember(model_class: Any, config: Any, verdict: Verdict, division: str = "") -> None:
    """Keeps a verdict for the next start."""
    kept.write(verdict, model_class.__name__, kept.described(config), division)


def compare(model_class: Any, config: Any, sizes: Sizes = SIZES, seed: int = 0) -> Verdict:
    """The comparison itself. A model with latents is compared in both forms, since either may be loaded."""
    heads = _compare(model_class, config, sizes, seed, latents=False)
    if not heads.latents:
        return heads
    found = _compare(model_class, config, sizes, seed, latents=True)
    if found.differs:
        heads.latents = False
        return heads
    return found if not heads.differs else heads


def _compare(model_class: Any, config: Any, sizes: Sizes, seed: int, *, latents: bool) -> Verdict:
    try:
        plain = build_small(model_class, config, sizes, "eager", seed)
        small = build_small(model_class, config, sizes, own_attention(model_class.__name__), seed)
    except Exception as error:  # classes of models may object in any way they like
        reason = error if isinstance(error, NotScalable) else f"{type(error).__name__}: {error}"
        said = f"it can't be compared with transformers, as it can't be scaled down: {reason}"
        return Verdict(differs=said[:300], compared=False, latents=False)
    with torch.inference_mode():
        try:
            kept = has_latents(small)
            prepared = prepare(small, torch.device("cpu"), latents=latents)
            shape = prepared.kv_shape(torch.float32)
        except Unservable as reason:
            return Verdict(differs=str(reason), latents=kept)
        truth = Truth(plain, ALLOWED_STEPWISE if prepared.stepwise else ALLOWED)
        try:
            truth([1, 2, 3])
        except Exception as error:
            said = f"transformers itself can't run it scaled down ({type(error).__name__}: {error})"
            return Verdict(differs=said[:300], compared=False, latents=False)
        differs = first_difference(prepared.forward, prepared, shape, truth, sizes)
        fused = differs and "the model itself differs"
        fused = fused or fused_difference(small, prepared, shape, truth, sizes)
        return Verdict(differs=differs, fused_differs=fused, latents=kept)


def build_small(model_class: Any, config: Any, sizes: Sizes, attention: str, seed: int) -> nn.Module:
    """A scaled-down model with random weights whose attention is ``attention``."""
    small = scale_down(config, sizes)
    small._attn_implementation = attention
    return build(model_class, small, seed)


class Truth:
    """Logits that transformers' own forward gives behind a text alone; passes are remembered by text. ``allowed``: how
    far others may be from them.
    """

    def __init__(self, module: Any, allowed: float = ALLOWED) -> None:
        self.allowed = allowed
        self.module, self.takes_positions = module, "position_ids" in parameters_of(module)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, tokens: list[int]) -> Tensor:
        """Those [tokens, vocab] behind each token."""
        key = tuple(tokens)
        if key not in self._known:
            ids = torch.tensor([tokens])
            # As generate has them: some models number positions otherwise where nobody does it for them.
            more = {"position_ids": torch.arange(len(tokens))[None]} if self.takes_positions else {}
            output = self.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more)
            self._known[key] = output.logits[0].float()
        return self._known[key]

    def differs(self, whole: list[int], length: int, got: Tensor) -> float:
        """How far ``got``, the logits behind the first ``length`` tokens of ``whole``, are from the truth.

        One pass over the whole text answers for all its beginnings, as later tokens change nothing before them. Where
        it does not agree, the beginning runs alone: of some models the length of a text changes all of it.
        """
        error = difference(got, self(whole)[length - 1])
        return error if error <= self.allowed or length == len(whole) else difference(got, self(whole[:length])[-1])


def fused_difference(
    module: Any,
    prepared: Prepared,
    shape: KVShape,
    truth: Truth,
    sizes: Sizes,
    *,
    shared: Callable[[Forward], Forward] = lambda forward: forward,
    plug: Plug | None = None,
) -> str:
    """Why the fused decoder is not for this model, or "". Of a model on several ranks ``shared`` makes of a pass over
    this rank's part one over the whole, and ``plug`` adds parts up.
    """
    from serve_app.models.decoders.decoder_parts import NotStandard, read_model
    from serve_app.models.decoders.fused_decoder import FusedForward

    model: Any = Small(module, shape, prepared.forward, prepared.vocab_size)
    try:
        forward = shared(FusedForward(read_model(model, lambda: probe(model, model.forward)), plug))
    except Exception as reason:  # classes of models object in any way they like
        return f"{reason}" if isinstance(reason, NotStandard) else f"{type(reason).__name__}: {reason}"
    found = first_difference(forward, prepared, shape, truth, sizes, (TOGETHER, CHUNKS))
    return found and f"the fused decoder differs: {found}"


def texts(sizes: Sizes, vocab: int) -> list[list[int]]:
    """Prompts that end before and beyond each border, one at the context's end, and one that goes another way in the
    middle of another."""
    borders = (sizes.window, sizes.chunk, sizes.original)
    lengths = [3, *(n - 1 for n in borders if n > 4), max(borders) + 40, sizes.context - NEW_TOKENS]
    made = [[(7 * i * i + 13 * n + 3 * i) % (vocab - 3) + 2 for i in range(n)] for n in lengths]
    return [*made, made[-1][:70] + [(5 * i + 1) % (vocab - 3) + 2 for i in range(9)]]


@dataclass(slots=True, frozen=True)
class Way:
    """One way to run the texts: ``times`` times all together, in batches of ``budget`` tokens, at most ``requests`` at
    once, in ``blocks`` blocks."""

    name: str
    requests: int
    budget: int
    blocks: int
    times: int = 1


TOGETHER, CHUNKS = Way("together", 64, 4096, 60), Way("in chunks, beside others", 64, 40, 60, 2)
ALONE, PREEMPTED = Way("alone", 1, 4096, 40), Way("after preemption", 64, 64, 13)


def first_difference(
    forward: Callable[[Any], Tensor],
    prepared: Prepared,
    shape: KVShape,
    truth: Truth,
    sizes: Sizes,
    ways: tuple[Way, ...] = (ALONE, TOGETHER, CHUNKS, PREEMPTED),
) -> str:
    """The first row of :func:`texts` in which ``forward`` differs from the truth, in words; "" where none does."""
    given = texts(sizes, prepared.vocab_size)
    for way in ways:
        scheduler = Scheduler(
            BlockPool(way.blocks),
            max_batch_tokens=way.budget,
            max_num_seqs=way.requests,
            max_model_len=sizes.context,
        )
        slots = 0
        if prepared.keeps:
            slots = 2 * way.requests + KEPT_STATES
            scheduler.states = StateSlots(slots, way.requests)
        scheduler.extend_at, scheduler.recompute = prepared.extend_at, prepared.recompute
        chosen = [given[0], given[-3]] if way is ALONE else given
        try:
            for prompt_len, whole, rows in _run(
                forward, scheduler, shape.allocate(way.blocks, "cpu", slots), chosen, way
            ):
                for length, got in rows:
                    if not prepared.recompute and prompt_len <= (prepared.extend_at or 0) < length:
                        continue  # keys of before keep their rotation, as in generate; a plain pass has none of them
                    error = truth.differs(whole[:length] if prepared.extend_at else whole, length, got)
                    if not error <= truth.allowed:
                        return f"a text of {length} tokens, run {way.name}, differs by {error:.2g} ({_named(sizes)})"
        except Exception as error:  # classes of models object in any way they like
            return f"a text, run {way.name}, fails ({type(error).__name__}: {error})"
    return ""


def _named(sizes: Sizes) -> str:
    return (
        f"scaled down to windows of {sizes.window}, chunks of {sizes.chunk}, an original length of {sizes.original} "
        f"and a context of {sizes.context}"
    )


def _run(
    forward: Callable[[Any], Tensor], scheduler: Scheduler, kv: Any, given: list[list[int]], way: Way
) -> list[tuple[int, list[int], list[tuple[int, Tensor]]]]:
    """Of each text its prompt's length, the tokens that it became, and its sampled rows: the tokens before it and its
    logits."""
    seen: list[Tensor] = []

    def watched(batch: Any) -> Tensor:
        seen.append(forward(batch).float())
        return seen[-1]

    runner = Runner(watched, kv)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    found = []
    for turn in range(way.times):
        requests = [Request(f"{turn} {i}", list(p), len(p), params, root=b"check") for i, p in enumerate(given)]
        rows: dict[str, list[tuple[int, Tensor]]] = {request.id: [] for request in requests}
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            step: Step = scheduler.next()
            sampled = runner.run(step)
            at = 0
            for item in step.scheduled:
                if item.samples:
                    rows[item.request.id].append((len(item.request.tokens), seen[-1][at]))
                at += item.samples
            seen.clear()
            scheduler.commit(step, sampled)
        found += [(len(r.tokens) - r.output_len, r.tokens[:-1], rows[r.id]) for r in requests]
    return found
