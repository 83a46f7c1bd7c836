"""A world in which steps take what a formula says and drafts stand by chance, for trying a controller in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.engine.drafts import accept
from serve_app.engine.speculation.counters import Counters
from serve_app.engine.speculation.proposer import Proposal
from serve_app.engine.speculation.speculate import Controller
from tests.engine.fake import request

STANDS, FAILS = 1, 0


@dataclass
class Source:
    """A proposer: the chance that a token stands by request number; seconds per token asked for, 0 for a free one."""

    name: str
    chance: Callable[[int], float]
    seconds: float = 0.0
    limit: int = 16
    continues: bool = True
    # How often it has something to say.
    speaks: float = 1.0

    @property
    def free(self) -> bool:
        return not self.seconds


@dataclass
class World:
    controller: Controller
    sources: list[Source]
    # (requests, rows) -> seconds
    cost: Callable[[int, int], float]
    batch: int = 4
    noise: float = 0.0
    # Seconds that a step which looks for drafts spends on that.
    look: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.requests = [request(str(i), [1], max_tokens=10**9) for i in range(64)]

    def run(self, steps: int) -> World:
        """``steps`` more; ``seconds``, ``tokens`` and ``drafted`` are those of these steps."""
        self.seconds, self.tokens, self.drafted, self.asked = 0.0, 0, [], {}
        while len(self.drafted) < steps:
            self.step()
        return self

    @property
    def speedup(self) -> float:
        """Against plain steps for as many tokens."""
        return self.tokens / self.batch * self.cost(self.batch, self.batch) / self.seconds

    def step(self) -> None:
        """One that looks for drafts, or those until then."""
        if pause := self.controller.plain_steps(self.batch):
            every = [self.took(self.batch) for _ in range(pause)]
            self.controller.ran_plain(self.batch, pause, sum(every))
            for seconds in every:
                self.count(seconds, self.batch, 0)
            return
        proposals = [Proposal(r, 16) for r in self.requests[: self.batch]]
        proposing = self.look
        for source in self.sources:
            members, count = self.controller.ask(source, proposals)
            if not members:
                continue
            for proposal in members:
                if self.chance.random() < source.speaks:
                    proposal.extend(source.name, 0, [STANDS] * count)
            self.controller.asked(source.name, members, count, source.seconds * count)
            proposing += source.seconds * count
            self.asked[source.name] = self.asked.get(source.name, 0) + 1
        kept = self.controller.verify(proposals)
        gained, chances = 0, {s.name: s.chance for s in self.sources}
        for index, (proposal, verified) in enumerate(zip(proposals, kept, strict=True)):
            new = []
            for source in [s.source for s in proposal.drafts for _ in s.tokens][:verified]:
                new.append(STANDS if self.chance.random() < chances[source](index) else FAILS)
                if new[-1] == FAILS:
                    break
            else:  # the target's own token behind the drafts, which an unverified one may have foretold
                rest = [s.source for s in proposal.drafts for _ in s.tokens][verified:]
                foretold = rest and self.chance.random() < chances[rest[0]](index)
                new.append(STANDS if foretold else FAILS)
            gained += len(new)
            self.controller.learn(proposal, new)
            drafted = [token for draft in proposal.drafts for token in draft.tokens]
            self.counters.verified(proposal, accept(drafted, new), verified)
            proposal.request.draft.clear()
        rows = self.batch + sum(kept)
        seconds = self.took(rows)
        self.controller.record(self.batch, rows, gained, seconds, proposing)
        self.count(seconds + proposing, gained, sum(kept))

    def took(self, rows: int) -> float:
        return self.cost(self.batch, rows) * (1 + self.noise * self.chance.expovariate(1))

    def count(self, seconds: float, tokens: int, drafted: int) -> None:
        self.seconds += seconds
        self.tokens += tokens
        self.drafted.append(drafted)
