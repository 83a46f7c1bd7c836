"""How well a draft drafts: the engine itself, on prompts that were held out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.distill.answers import limits
from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import build_engine, num_blocks
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.speculate import Speculation
from serve_app.models.heads.eagle import attach_head
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.models.loading.folder import read_config
from serve_app.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve_app.distill.train import Options


@dataclass(slots=True)
class Acceptance:
    """``length``: tokens that come out of a step of the target, its own one counted; ``rate``: of the drafts that were
    verified, those that stood. Greedy answers to held-out prompts.
    """

    length: float
    rate: float
    prompts: int
    tokens: int


def measure(folder: Path, draft: Path, options: Options, prompts: list[list[int]]) -> Acceptance:
    """Loads both again from their folders, as a worker would, and answers ``prompts`` one by one."""
    model = load_causal_lm(folder, dtype=options.dtype, device=options.device)
    model = replace(model, max_model_len=min(model.max_model_len, 4096))
    if "draft_vocab_size" in read_config(draft):
        engine = eagle_engine(model, draft, prompts, options.answer_tokens, options.tokens)
    else:
        engine = draft_engine(model, draft, prompts, options.answer_tokens, options.tokens)
    return count(engine, prompts, options.answer_tokens)


def eagle_engine(model: CausalModel, folder: Path, prompts: list[list[int]], answer: int, tokens: int) -> Engine:
    """An engine that always drafts with the head in ``folder``."""
    head = attach_head(model, folder)
    size = limits(model, prompts, answer)
    size.reserved_blocks = 1
    engine = build_engine(model, size)
    proposer = EagleProposer(head, engine.runner.kv, engine.scheduler.blocks, 1)
    engine.runner.observer = proposer
    engine.speculation = Speculation(proposer, VerifyEverything(tokens), vocab_size=model.vocab_size)
    return engine


def draft_engine(model: CausalModel, folder: Path, prompts: list[list[int]], answer: int, tokens: int) -> Engine:
    """An engine that always drafts with the model in ``folder``."""
    engine = build_engine(model, limits(model, prompts, answer))
    draft = load_causal_lm(folder, dtype="auto", device=str(model.device))
    size = num_blocks(limits(draft, prompts, answer), draft.kv_shape.block_bytes)
    runner = Runner(draft.forward, draft.kv_shape.allocate(size, draft.device))
    proposer = DraftProposer(DraftEngine(runner, BlockPool(size), max_model_len=draft.max_model_len).propose)
    engine.speculation = Speculation(proposer, VerifyEverything(tokens), vocab_size=model.vocab_size)
    return engine


def count(engine: Engine, prompts: list[list[int]], answer: int) -> Acceptance:
    """Answers ``prompts`` greedily, one at a time, and counts what each step yields after an answer's first token."""
    steps = tokens = 0
    for index, prompt in enumerate(prompts):
        room = min(answer, engine.scheduler.max_model_len - len(prompt) - 1)
        sampling = SamplingParams(max_tokens=max(1, room), temperature=0.0)
        engine.add(Request(str(index), list(prompt), len(prompt), sampling, b"measure"))
        while engine.has_work:
            for output in engine.step():
                if output.offset:
                    steps += 1
                    tokens += len(output.token_ids)
    assert engine.speculation is not None
    rate = float(engine.speculation.stats()["acceptance_rate"])
    return Acceptance(tokens / max(1, steps), rate, len(prompts), tokens)
