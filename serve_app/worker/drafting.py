"""How a worker's drafts are made: by the Draft deployment, by a draft model in the worker's own process, or by an
EAGLE-3 head. Imports torch, so workers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import EngineLimits, num_blocks
from serve_app.engine.engine import Engine
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.proposer import Proposer
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.worker.draft_adapters import put_draft_adapters
from serve_app.worker.draft_link import DraftLink

if TYPE_CHECKING:
    from serve_app.worker.spec import WorkerSpec


@dataclass(slots=True)
class Drafter:
    """A proposer to be: ``plug_in`` makes it once the engine is there.

    ``reserved_blocks``: of the engine's cache, for the proposer alone. ``weights``: a folder whose content changes what
    lies in the cache, and so belongs to its keys.
    """

    plug_in: Callable[[Engine], Proposer]
    reserved_blocks: int = 0
    weights: Path | None = None


def make_drafter(spec: WorkerSpec, model: CausalModel, folder: Path | None, link: DraftLink) -> Drafter | None:
    """What ``spec`` asks for; ``folder`` holds the draft's weights unless a deployment has them.

    An EAGLE-3 head is needed in a prefill worker as well, which drafts nothing: its K/V are part of the cache. Raises
    :class:`~serve_app.models.load.UnsupportedModel` for weights that do not fit ``model``.
    """
    if spec.draft_method == "eagle3":
        assert folder is not None
        return eagle_drafter(model, folder, spec)
    if not spec.draft_tokens:
        return None
    if spec.draft_method == "colocated":
        assert folder is not None
        return model_drafter(model, folder, spec)
    return Drafter(lambda engine: DraftProposer(link, limit=spec.draft_tokens, reachable=lambda: link.connected))


def eagle_drafter(model: CausalModel, folder: Path, spec: WorkerSpec) -> Drafter:
    """The EAGLE-3 head in ``folder``; makes room for its K/V in ``model.kv_shape``."""
    from serve_app.models.heads.eagle import attach_head

    head = attach_head(model, folder)
    # A chain of up to 16 runs over the end of a block of 32 in about one step of four.
    spare = max(1, -(-spec.max_num_seqs // 4))

    def plug_in(engine: Engine) -> Proposer:
        proposer = EagleProposer(head, engine.runner.kv, engine.scheduler.blocks, spare, limit=spec.draft_tokens)
        engine.runner.observer = proposer
        return proposer

    return Drafter(plug_in, spare, folder)


def model_drafter(model: CausalModel, folder: Path, spec: WorkerSpec) -> Drafter:
    """The draft model in ``folder``, on the target's device with a cache of its own; no call leaves the process."""
    draft = load_causal_lm(
        folder,
        dtype=spec.dtype,
        device=str(model.device),
        max_model_len=model.max_model_len,
        adapters=len(spec.draft_lora),
    )
    limits = EngineLimits(0, spec.max_batch_tokens, spec.max_num_seqs, draft.max_model_len)
    blocks = num_blocks(limits, draft.kv_shape.block_bytes)
    engine = DraftEngine(
        Runner(draft.forward, draft.kv_shape.allocate(blocks, draft.device)),
        BlockPool(blocks),
        max_batch_tokens=spec.max_batch_tokens,
        max_model_len=draft.max_model_len,
        places=put_draft_adapters(spec.draft_lora, spec.source, draft),
    )
    return Drafter(lambda _: DraftProposer(engine.propose, limit=spec.draft_tokens))
