"""What one division of a model has computed with an adapter every other takes over from the pool, and answers as PEFT
does; for requests without the adapter, or with another, it is nothing."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, blob, digest_of
from serve_app.state.blobs.files import open_files
from serve_app.wire.generate import AdapterAt
from tests import tiny
from tests.models.heads.written import write_head
from tests.parallel.test_adapters import forms
from tests.parallel.test_handover import ANSWER, DIVISIONS, HEAD, LENGTH, Division, prompt
from tests.parallel.workers import visit, working
from tests.parity.test_adapters import make
from tests.worker.world import MemoryPool, call, prefill_call, read

pytestmark = pytest.mark.slow
WHOLE: tuple[Division, ...] = ((2, 1), (2, 2, "whole"), (2, 1, "whole"), (1, 2), (1, 1))


@dataclass(slots=True)
class Case:
    """``options`` are the workers'."""

    family: str
    divisions: tuple[Division, ...] = DIVISIONS
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama"),
    "llama with a head": Case("llama", options=HEAD),
    "mixtral with a head": Case("mixtral", WHOLE, HEAD),
    # Which has heads in the place of latents where it has adapters.
    "deepseek_v3": Case("deepseek_v3", WHOLE),
    "qwen3_next": Case("qwen3_next", ((2, 1), (1, 2), (2, 2), (1, 1))),
}


class Adapters:
    """Two adapters of the model in ``path``, in a store of files, and what PEFT answers: by adapter (0: none) and
    division whose prompt it is."""

    def __init__(self, path: Path, family: str, divisions: tuple[Division, ...], folder: Path) -> None:
        self.where = str(folder / "files")
        base, files = tiny.load_reference(path), open_files(self.where)
        self.at: list[AdapterAt | None] = [None]
        self.answers: dict[tuple[int, Division], list[int]] = {}
        made = [make(base, folder / str(i), form, i) for i, form in enumerate(forms(family), start=1)]
        for number, own in enumerate((None, *made)):
            model = tiny.load_reference(path)
            if own is not None:
                config, weights = ((own / name).read_bytes() for name in (CONFIG, WEIGHTS))
                digest = digest_of(config, weights)
                for name, data in ((CONFIG, config), (WEIGHTS, weights)):
                    files.put(blob(digest, name), data)
                self.at.append(AdapterAt(digest, len(config) + len(weights)))
                model = PeftModel.from_pretrained(model, own).eval()
            for division in divisions:
                self.answers[number, division] = tiny.reference_tokens(
                    model, prompt(division), ANSWER, eos_token_id=None
                )


@pytest.mark.parametrize("name", CASES)
def test_every_division_takes_over_from_every_other(tmp_path, one_thread, name):
    case = CASES[name]
    folder, divisions = tiny.write_checkpoint(tmp_path / "model", case.family), case.divisions
    options = case.options | {"adapters": 2}
    if case.options:
        head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        options |= {"draft_weights": {"path": str(head)}}
    adapters = Adapters(folder, case.family, divisions, tmp_path)
    options["files"] = adapters.where
    for division in divisions:  # else nothing would be shown
        assert len({tuple(adapters.answers[number, division]) for number in range(3)}) == 3
    pool, took = MemoryPool(), set()

    def started(division: Division) -> Any:
        tensor, pipeline, *whole = division
        ways = {"expert_parallel": tensor} if whole else {}
        return working(folder, pool, tensor, pipeline, **ways, **options)

    async def answers(work, inbox, number, giving):
        asked = call(prompt(giving), inbox, max_tokens=ANSWER, adapter=adapters.at[number])
        tokens, result = await read(inbox, asked, lambda: work.generate(asked))
        assert tokens == adapters.answers[number, giving], (number, giving)
        return result.path

    async def takes(work, inbox, taking, giving):
        """Both adapters' texts and the model's own, in one batch."""
        for path in await asyncio.gather(*(answers(work, inbox, number, giving) for number in (1, 0, 2))):
            assert (path.node, path.computed) == (LENGTH - 1, 1), (taking, giving, path)
        took.add((taking, giving))

    async def gives(work, inbox, division):
        for at in adapters.at:
            assert (await work.prefill(prefill_call(prompt(division), adapter=at))).cached == 0
        if case.options:
            assert (await answers(work, inbox, 1, division)).computed == 1
            assert work.stats().numbers["speculation"]["proposed_tokens"] > 0

    asyncio.run(visit(divisions, started, takes, gives))
    assert took == set(itertools.permutations(divisions, 2))
