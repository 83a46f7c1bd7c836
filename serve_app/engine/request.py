"""One sequence in the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve_app.kv.keys import BLOCK_TOKENS, all_over, block_keys
from serve_app.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from serve_app.engine.constrain import Constraint
    from serve_app.engine.crossing import Beside
    from serve_app.engine.rules import Rules
    from serve_app.engine.scores import Scores

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ERROR = "error"  # the engine failed; another may succeed
FINISH_REFUSED = "refused"  # this request can't be run by any engine like this one


@dataclass(slots=True)
class EmbeddedSpan:
    """Prompt tokens [start, start + count) whose embeddings are given: features of an image or of sound, say.

    The tokens themselves are placeholders within the vocabulary. ``digest`` names the values in cache keys, which
    placeholders cannot tell apart. ``read()`` gives the values [count, hidden], which stand where the model's embedding
    layer would have put its own; it is asked in the engine's thread, when a step computes some of these tokens, and so
    never for a span that is found in a cache. ``whole``: its tokens see each other in both directions, so a step that
    computes some of them goes on to its end. ``grid``: rows and columns that they lie in, row by row, where positions
    follow from that (:mod:`serve_app.engine.positions`). ``beside``: what layers of their own attend to; then there are
    no values, and its token is embedded as any other (:mod:`serve_app.engine.crossing`).
    """

    start: int
    count: int
    digest: bytes
    read: Callable[[], Tensor]
    whole: bool = False
    grid: tuple[int, int] | None = None
    beside: Callable[[], Beside] | None = None

    @property
    def end(self) -> int:
        return self.start + self.count


def unbroken(request: Request, start: int, count: int) -> int:
    """``count`` tokens of ``request`` from ``start`` on without the beginning of a span that is computed as a whole;
    all of it, however long, where it comes first.
    """
    for span in request.embedded if count else ():
        if span.whole and span.start < start + count < span.end:
            return (span.start if span.start > start else span.end) - start
    return count


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine.

    ``tokens`` holds prompt and output together. Requests have no phases: the scheduler only lets ``computed`` (tokens
    whose K/V lie in ``blocks``) catch up with ``known`` (tokens, plus ``draft`` tokens waiting to be verified).
    """

    id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    root: bytes
    # Known tokens that were generated before (by a worker that was lost); they count as output.
    resumed: int = 0
    status: Status = Status.WAITING
    computed: int = 0
    # Blocks, from the first on, that already carry their key.
    sealed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    # Tokens that were drafted so far, and those of them that stood.
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    preemptions: int = 0
    # Steps of it that are under way, as long as which it does not make way; what follows depends on what they give.
    under_way: int = 0
    held: bool = False
    # A prefill-only request wants K/V and no token: it finishes once `tokens` are computed.
    prefill_only: bool = False
    finish_reason: str | None = None
    # How tokens before `sampling.min_tokens` are drawn; the scheduler sets it where there is such a minimum.
    early: SamplingParams | None = None
    # What the model's folder asks of each token, where that depends on those before it.
    rules: Rules | None = None
    # The compiled `sampling.grammar`, which has read the output so far.
    constraint: Constraint | None = None
    # Longer than the context that the model was trained with first, so that all its positions are rotated otherwise.
    extended: bool = False
    # Whose request it is, as the pool knows tenants.
    tenant: bytes = b""
    # Its tenant's, where places are shared.
    weight: float = 1.0
    # When it began to wait, or got its place, on the scheduler's clock; and whether it waits because it made way.
    since: float = 0.0
    paused: bool = False
    # Batch work: it takes what the others leave of the engine, and at least this share of its time; None: real-time.
    share: float | None = None
    # Which of the loaded adapters its tokens pass through, from 1 on; 0: none. ``root`` names it in cache keys.
    adapter: int = 0
    # Its digest, by which a draft model knows its own; "": none.
    adapter_digest: str = ""
    # In order, none over another, all within the prompt.
    embedded: list[EmbeddedSpan] = field(default_factory=list)
    # Tokens that it has in common with others that come with it: the one that is nothing else computes them.
    shared: int = 0
    # Slots of states (`serve_app.engine.states`): what its computed tokens have left (0: nothing yet), and where a step
    # that is under way writes to, if that is another.
    state: int = 0
    state_next: int = 0
    # So many tokens the first of them has seen.
    state_at: int = 0
    # So many tokens are cached that another began with, without a state: one is to be kept there.
    branch: int = 0
    # Tokens whose log-probabilities are wanted beside those of the first one that is generated.
    asked: tuple[int, ...] = ()
    # Prompt tokens whose rows have told the log-probability of the next one, and what they told.
    scored: int = 0
    scores: list[Scores] = field(default_factory=list)

    def verified(self, accepted: int) -> None:
        """So many of ``draft`` stood, and none waits any more."""
        self.drafted += len(self.draft)
        self.accepted += accepted
        self.draft.clear()

    @property
    def batch(self) -> bool:
        return self.share is not None

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.sampling.max_tokens - self.output_len

    @property
    def known(self) -> int:
        return len(self.tokens) + len(self.draft)

    @property
    def score_end(self) -> int:
        """One past the last prompt token whose row tells a log-probability that is wanted: the last one's is sampled
        from."""
        return self.prompt_len - 1 if self.sampling.prompt_logprobs is not None else 0

    @property
    def media(self) -> list[tuple[int, int, bytes]]:
        """The embedded spans as cache keys know them."""
        spans = [(span.start, span.end, span.digest) for span in self.embedded]
        return [*all_over(d for _, _, d in spans), *spans] if any(s.beside for s in self.embedded) else spans

    @property
    def pending(self) -> int:
        """Tokens whose K/V are still to be computed, drafts included."""
        return self.known - self.computed

    def name_blocks(self, tokens: int) -> None:
        """Gives the full blocks of the first ``tokens`` their keys."""
        full = tokens // BLOCK_TOKENS
        if len(self.keys) < full:
            self.keys = block_keys(self.root, self.tokens[: full * BLOCK_TOKENS], known=self.keys, media=self.media)
