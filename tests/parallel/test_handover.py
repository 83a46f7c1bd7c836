"""What one division of a model has computed every other takes over from the pool, and answers as ``generate`` does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from serve_app.models.load import load_causal_lm
from tests import tiny
from tests.models.heads.written import write_head
from tests.packed import write_float4
from tests.parallel.test_quantized import WIDE
from tests.parallel.workers import visit, working
from tests.parity.test_stateful import FAMILIES as STATEFUL
from tests.worker.world import MemoryPool, call, prefill_call, read

pytestmark = pytest.mark.slow
LENGTH, ANSWER = 300, 16
# Ranks that divide layers, stages, and "whole" where experts lie whole on ranks. Rank 0 of each is this process, so
# that there is one at a time.
Division = tuple[Any, ...]
DIVISIONS: tuple[Division, ...] = ((4, 1), (2, 1), (1, 2), (2, 2), (1, 1))
LAYOUTS: tuple[Division, ...] = ((4, 1, "whole"), (2, 1), (2, 2, "whole"), (2, 1, "whole"), (1, 1))
HEAD = {"draft_method": "eagle3", "speculate_tokens": 3, "draft_tokens": 3, "always_draft": True}
# Experts whose columns two ranks keep as codes.
PACKED = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}


@dataclass(slots=True)
class Family:
    """``write`` makes a checkpoint; ``options`` are the workers'. ``alone``: answers are those of one process with the
    same options, which rounds weights as ranks do, and not those of ``generate``.
    """

    write: Callable[[Path], Path]
    options: dict[str, Any] = field(default_factory=dict)
    divisions: tuple[Division, ...] = DIVISIONS
    alone: bool = False


def plain(family: str, **sizes: Any) -> Callable[[Path], Path]:
    return lambda path: tiny.write_checkpoint(path, family, **sizes)


def small(family: str, **overrides: Any) -> Callable[[Path], Path]:
    return lambda path: tiny.write_small(path, getattr(transformers, family), **overrides)


def hybrid(family: str) -> Callable[[Path], Path]:
    return small(family, **STATEFUL[family])


FAMILIES = {
    "llama": Family(plain("llama")),
    "llama with a head": Family(plain("llama"), HEAD),
    "deepseek_v3": Family(plain("deepseek_v3")),
    "mixtral": Family(plain("mixtral"), divisions=LAYOUTS),
    "qwen3_next": Family(hybrid("Qwen3NextForCausalLM"), divisions=((2, 1), (2, 2), (1, 2), (2, 1, "whole"), (1, 1))),
    # Indexers' keys, which layers share; entries that stand for several tokens, and states of what they are made of.
    "glm_moe_dsa": Family(small("GlmMoeDsaForCausalLM", indexer_types=["full", "full", "shared", "full"])),
    "deepseek_v4": Family(small("DeepseekV4ForCausalLM"), divisions=((2, 1), (1, 2), (2, 2), (2, 1, "whole"), (1, 1))),
    "nemotron_h": Family(hybrid("NemotronHForCausalLM"), divisions=((2, 1), (1, 2), (2, 2), (1, 1))),
    "gpt_oss in four bits": Family(lambda path: write_float4(path, **PACKED), divisions=LAYOUTS),
    "llama in int8": Family(plain("llama", **WIDE), {"quantization": "int8"}, alone=True),
}


def prompt(division: Division) -> list[int]:
    """One that is ``division``'s to compute."""
    seed = [len(division), *division[:2]]
    return np.random.default_rng(seed).integers(3, 250, LENGTH).tolist()


def right_answers(family: Family, folder: Path) -> dict[Division, list[int]]:
    if not family.alone:
        reference = tiny.load_reference(folder)
        return {d: tiny.reference_tokens(reference, prompt(d), ANSWER, eos_token_id=None) for d in family.divisions}
    engine = tiny.make_engine(load_causal_lm(folder, dtype="float32", **family.options))
    for division in family.divisions:
        engine.add(tiny.make_request(str(division), prompt(division), max_tokens=ANSWER, ignore_eos=True))
    found = tiny.run_all(engine)
    return {division: found[str(division)] for division in family.divisions}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_division_takes_over_from_every_other(tmp_path, one_thread, name):
    family = FAMILIES[name]
    (tmp_path / "model").mkdir()
    folder, divisions, options = (
        family.write(tmp_path / "model") or tmp_path / "model",
        family.divisions,
        family.options,
    )
    if options.get("draft_method"):
        head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        options = options | {"draft_weights": {"path": str(head)}}
    right = right_answers(family, folder)
    pool = MemoryPool()
    took: set[tuple[Division, Division]] = set()

    def started(division: Division) -> Any:
        tensor, pipeline, *whole = division
        ways = {"expert_parallel": tensor} if whole else {}
        return working(folder, pool, tensor, pipeline, **ways, **options)

    async def takes(work, inbox, taking, giving):
        asked = call(prompt(giving), inbox, max_tokens=ANSWER)
        tokens, result = await read(inbox, asked, lambda: work.generate(asked))
        assert tokens == right[giving], (taking, giving)
        # The last token of a prompt is always computed.
        assert (result.path.node, result.path.computed) == (LENGTH - 1, 1), (taking, giving, result.path)
        if options.get("draft_method"):
            assert work.stats().numbers["speculation"]["proposed_tokens"] > 0
        took.add((taking, giving))

    async def gives(work, inbox, division):
        assert (await work.prefill(prefill_call(prompt(division)))).cached == 0

    asyncio.run(visit(divisions, started, takes, gives))
    assert took == set(itertools.permutations(divisions, 2))
