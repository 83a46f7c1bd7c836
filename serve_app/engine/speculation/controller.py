"""Whom to ask for drafts, and how many of their tokens to verify: what yields most tokens per second, down to none.

::

    chance          that a draft token stands if those before it do: measured       acceptance.py
    reach_j         chance_1 · ... · chance_j, that token j of a request's drafts stands
    seconds(n)      of a step that verifies n draft tokens: measured                costs.py
    rate(n)         (batch + the n largest reaches) / (seconds(n) + drafting)       tokens per second

    each step       asks a proposer that takes time only if the best rate with it is above the best without it,
                    then verifies the n tokens with the best rate(n), often none
    never slower    a step spends what it took and earns what its tokens would have cost in plain steps; where too much
                    was lost, steps are plain until it is earned again              budget.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve_app.engine.drafts import accept
from serve_app.engine.speculation.acceptance import Acceptance
from serve_app.engine.speculation.budget import LossBudget
from serve_app.engine.speculation.costs import DraftCosts, StepCosts
from serve_app.engine.speculation.policy import Policy
from serve_app.engine.speculation.proposer import Draft, Proposal, Proposer

# The budget of steps that asked no proposer that takes time.
FREE = ""
# Tokens less likely to stand are not worth a row, whatever it costs.
FLOOR = 0.05
RETRY_MOST = 8192
POLICY = Policy()


@dataclass(slots=True)
class DraftLength:
    """A number of draft tokens to verify, and what the step is expected to yield and to take."""

    drafts: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class SpeculationController:
    """Decides from measured acceptance and measured times; methods are named in the order of a step."""

    def __init__(self, max_tokens: int, policy: Policy = POLICY) -> None:
        self.max_tokens = max_tokens
        self.policy = policy
        self.acceptance = Acceptance(policy)
        self.costs = StepCosts(curve=policy.cost_curve)
        self.drafting = DraftCosts()
        self.budgets = {FREE: LossBudget(policy)}
        self.steps = self.drafted_steps = 0
        self.choices: Counter[str] = Counter()
        self.last: dict[str, Any] = {}
        self._batch = 0
        self._plain: float | None = None
        self._why = ""
        # The budget that this step is booked to.
        self._payer = FREE
        self._since_plain = 0
        self._retry = self._retry_at = policy.retry
        # (proposer, request) pairs that met before.
        self._met: set[tuple[str, str]] = set()

    # -- a step, in the order of the calls -----------------------------------------------------------------------------

    def plain_steps(self, batch: int) -> int:
        """How many steps of ``batch`` generating requests, from this one on, should not look for drafts."""
        self._batch, self._plain = batch, self.costs.plain(batch)
        # Until one that takes time is asked, for whose sake the step looks.
        self._payer = next((name for name, budget in self.budgets.items() if not budget.used_up), FREE)
        self._why = "turned off" if not self.max_tokens else "lost lately"
        if not self.max_tokens or all([budget.used_up for budget in self.budgets.values()]):
            return self.policy.rest
        self._why = "measuring plain"
        return int(self._plain is None or 0 < self.policy.refresh <= self._since_plain)

    def ran_plain(self, batch: int, steps: int, seconds: float) -> None:
        """``steps`` that did not look for drafts took ``seconds`` together."""
        self.acceptance.tick(steps)
        self.choices[self._why] += steps
        self.steps += steps
        self._since_plain = 0
        self.costs.record(batch, batch, seconds / steps)
        for budget in self.budgets.values():
            budget.ran_plain(seconds, steps)

    def ask(self, proposer: Proposer, proposals: list[Proposal]) -> tuple[list[Proposal], int]:
        """The proposals that a proposer should extend, and by how many tokens at most."""
        limit = min(proposer.limit, self.max_tokens)
        if proposer.free:
            if self.budgets[FREE].used_up:
                return [], 0
            return [p for p in proposals if p.room > p.length and (proposer.continues or not p.drafts)], limit
        payer = proposer.name if self.policy.own_budgets else FREE
        if not limit or self.budgets.setdefault(payer, LossBudget(self.policy)).used_up:
            return [], 0
        found = self._worth_asking(proposer, proposals, limit)
        if found[1]:
            self._payer = payer
        return found

    def asked(self, source: str, proposals: list[Proposal], count: int, seconds: float) -> None:
        """A proposer drafted ``count`` tokens, which took ``seconds``."""
        pairs = {(source, p.request.id) for p in proposals}
        # Meeting a request costs a draft model its prompt, which says nothing about the next time.
        if pairs <= self._met:
            self.drafting.record(source, len(proposals), count, seconds)
        self._met |= pairs

    def verify(self, proposals: list[Proposal]) -> list[int]:
        """How many tokens of each proposal to verify."""
        self.acceptance.tick()
        self._since_plain += 1
        if self._plain is None or not any([p.drafts for p in proposals]):
            self.choices["nothing proposed"] += 1
            return [0] * len(proposals)
        reaches = [self._reaches(p) for p in proposals]
        ranking = _ranked(reaches)
        plan, why = self._best(ranking), "pays"
        if plan.drafts:
            self._retry = self.policy.retry
            self._retry_at = min(self._retry_at, self.acceptance.now + self._retry)
        else:
            hopeful = self._best(ranking, doubt=0.5)
            plan, why = (hopeful, "trying again") if hopeful.drafts and self._try_again() else (plan, "too dear")
        self.choices[why] += 1
        gain = plan.rate * self._plain / self._batch
        self.last = {"batch": self._batch, "drafts": plan.drafts, "why": why, "expected_gain": round(gain, 3)}
        order = sorted([(-reach, index) for index, of_one in enumerate(reaches) for reach in of_one])
        kept = [0] * len(proposals)
        for _, index in order[: plan.drafts]:
            kept[index] += 1
        return kept

    def learn(self, proposal: Proposal, new: list[int]) -> None:
        """``new`` are the tokens that came. Drafts are compared with them, whether they were verified or not."""
        for drafts in (proposal.replaced, proposal.drafts):
            at = 0
            for draft in drafts:
                true = new[at : at + len(draft.tokens)]
                stood = accept(draft.tokens, true)
                if true:
                    tried = min(stood + 1, len(true))
                    self.acceptance.learn(proposal.request.id, draft.source, draft.grade, stood, tried)
                if stood < len(draft.tokens):
                    break
                at += stood

    def record(self, batch: int, rows: int, gained: int, seconds: float, looking: float) -> None:
        """A step in which every request generated: ``rows`` computed, ``gained`` tokens, its time without and that of
        looking for drafts.
        """
        self.steps += 1
        self.drafted_steps += rows > batch
        if self._plain is not None:
            expected = self.costs.expected(batch, rows - batch)
            # The noise of a step without drafts has nothing to do with looking.
            spent = seconds if rows > batch else expected
            self._book(gained / batch * self._plain, spent + looking)
        self.costs.record(batch, rows, seconds, looked=True)

    def disturbed(self, looking: float) -> None:
        """A step whose own time says nothing took so long for looking for drafts."""
        self._book(0.0, looking)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.acceptance.forget(request_id)
        self._met = {pair for pair in self._met if pair[1] != request_id}

    def stats(self) -> dict[str, Any]:
        """Counters, what was chosen and why, and what is known about costs (milliseconds)."""
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "seconds_gained": round(sum(budget.gained for budget in self.budgets.values()), 3),
            "choices": dict(self.choices),
            "last": self.last,
            "step_ms": self.costs.table(),
        }

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _book(self, worth: float, spent: float) -> None:
        if self._plain is None:
            return
        for name, budget in self.budgets.items():
            if name == self._payer:
                budget.looked(worth, spent, self._plain)
            else:
                budget.ran_plain(self._plain)

    def _reaches(self, proposal: Proposal) -> list[float]:
        """The chance that each drafted token stands, which it only can if those before it do."""
        found: list[float] = []
        reach = 1.0
        for draft in proposal.drafts:
            chance = self._chance(proposal, draft)
            for _ in draft.tokens:
                reach *= chance
                if reach < FLOOR:
                    return found
                found.append(reach)
        return found

    def _chance(self, proposal: Proposal, draft: Draft) -> float:
        return self.acceptance.chance(proposal.request.id, draft.source, draft.grade)

    def _best(self, ranking: list[float], drafting: float = 0.0, doubt: float = 1.0) -> DraftLength:
        """The plan with the best rate, tokens taken from the most likely down. ``doubt`` scales what they are believed
        to cost. Little more than twice as many rows as were ever measured: costs may rise in cliffs.
        """
        plain = self._plain or 0.0
        ranking = ranking[: 2 * self.costs.most_rows(self._batch) + self._batch]
        tokens = self._batch + np.add.accumulate([0.0, *ranking])
        more = self.costs.seconds(self._batch, np.arange(1.0 + len(ranking))) - plain
        seconds = plain + doubt * more + drafting
        at = int((tokens / seconds).argmax())
        return DraftLength(at, float(tokens[at]), float(seconds[at]))

    def _try_again(self) -> bool:
        """Whether it is time to doubt what was measured."""
        now = self.acceptance.now
        if not self.policy.retry or now < self._retry_at:
            return False
        self._retry = min(2 * self._retry, RETRY_MOST)
        self._retry_at = now + self._retry
        return True

    def _worth_asking(self, proposer: Proposer, proposals: list[Proposal], limit: int) -> tuple[list[Proposal], int]:
        """Compares the best step without this proposer with the best one with it, for a few numbers of tokens."""
        members: list[Proposal] = []
        begins: list[tuple[float, float]] = []
        without, given = [], []
        replaced = []
        for proposal in proposals:
            reaches = self._reaches(proposal)
            without.append(reaches)
            chance = self._chance(proposal, Draft([], 0, proposer.name))
            first = 1.0
            if proposal.drafts:
                if (reaches[0] if reaches else 0.0) + self.policy.replace_below < chance:
                    replaced.append(proposal)
                    reaches = []
                elif proposer.continues and len(reaches) == proposal.length < proposal.room:
                    first = reaches[-1]
                else:
                    first = 0.0
            given.append(reaches)
            if first and proposal.room:
                members.append(proposal)
                begins.append((first, chance))
        best, best_count = self._best(_ranked(without)).rate, 0
        if members:
            each = self.drafting.per_token(proposer.name, len(members), self._plain or 0.0)
            counts = sorted({*(c for c in (1, 2, 4, 8) if c < limit), limit})
            for doubt in (1.0, 0.5):
                for count in counts:
                    chains = [[f * c**j for j in range(1, count + 1) if f * c**j >= FLOOR] for f, c in begins]
                    plan = self._best(_ranked(given + chains), doubt * count * each, doubt)
                    if plan.rate > best:
                        best, best_count = plan.rate, count
                if best_count or not self._try_again():
                    break
        if not best_count:
            self.choices[f"{proposer.name} not asked"] += 1
            return [], 0
        for proposal in replaced:
            proposal.clear()
        return members, best_count


def _ranked(reaches: list[list[float]]) -> list[float]:
    """All of them, best first."""
    return sorted([reach for of_one in reaches for reach in of_one], reverse=True)
