"""Whom to ask for drafts, and how many of them to verify: what yields most tokens per second, down to none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from serve_app.engine.speculation import asking, draft_plan
from serve_app.engine.speculation.acceptance import Acceptance
from serve_app.engine.speculation.draft_plan import Plan
from serve_app.engine.speculation.ledger import Ledger
from serve_app.engine.speculation.offer import Offer, Proposer, Segment
from serve_app.engine.speculation.rhythm import Rhythm
from serve_app.engine.speculation.step_costs import AskCosts, StepCosts

# The name under which steps are booked that asked no proposer that takes time.
FREE = ""


@dataclass(slots=True)
class _Source:
    """Counters of one proposer. ``tokens`` are those verified."""

    asked: int = 0
    seconds: float = 0.0
    tokens: int = 0
    accepted: int = 0
    # Ids of the requests it has been asked about.
    met: set[str] = field(default_factory=set)


class SpeculationController:
    """Decides from measured acceptance and measured step times.

    The tokens of all offers are ranked by their chance of standing; the more are verified, the more a step yields and
    the longer it takes. The number that yields most tokens per second is taken, if it beats a plain step by ``MARGIN``.
    Proposers that take time are asked only if that is expected to raise the rate further. Where looking for drafts has
    brought nothing lately, or has cost too much, most steps do not look at all and are as plain ones.
    """

    MARGIN = 1.03
    # One step in so many does not look, so that what drafts are compared with stays true; one in ``SOON`` for each time
    # that this was measured before, while that is less.
    REFRESH, SOON = 64, 4
    # One drafted step in so many verifies fewer or more than seems best: costs rise in stairs.
    VARY, VARIED = 32, (2.0, 0.5, 1.5)
    # Where drafts have been too dear for so many steps they are tried again, then after twice as many, and so on.
    RETRY, RETRY_MOST = 16, 8192

    def __init__(self, max_tokens: int, *, always: bool = False) -> None:
        self.max_tokens = max_tokens
        self.always = always
        self.acceptance = Acceptance()
        self.costs = StepCosts()
        self.asking = AskCosts()
        self.ledgers = {FREE: Ledger()}
        self.rhythm = Rhythm()
        self.steps = self.drafted_steps = self.drafts = 0
        self.choices: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()
        self.last: dict[str, Any] = {}
        self._sources: dict[str, _Source] = {}
        self._batch = 0
        self._plain: float | None = None
        self._why = ""
        self._asked = FREE
        # The last step with drafts took twice as long as expected.
        self._slow = False
        self._since_plain = self._paying = 0
        self._retry, self._retry_at = self.RETRY, self.RETRY

    # -- a step, in the order of the calls -----------------------------------------------------------------------------

    def begin(self, batch: int) -> int:
        """A step of ``batch`` generating requests begins. From this one on, how many should not look for drafts."""
        self._batch = batch
        self._plain = self.costs.plain(batch)
        # Until one that takes time is asked, for whose sake the step looks.
        self._asked = next((name for name, ledger in self.ledgers.items() if not ledger.suspended), FREE)
        self._why, pause = ("", 0) if self.always else self._pause(batch)
        return pause

    def stepped_aside(self, batch: int, steps: int, seconds: float) -> None:
        """``steps`` for which nobody looked were run: plain ones of ``batch`` requests, in ``seconds`` together."""
        self.acceptance.tick(steps)
        self.choices[self._why] += steps
        self.steps += steps
        self._since_plain = 0
        self.costs.record(batch, batch, seconds / steps)
        for ledger in self.ledgers.values():
            ledger.stepped_aside(seconds, steps)

    def ask(self, proposer: Proposer, offers: list[Offer]) -> tuple[list[Offer], int]:
        """The offers that a proposer should extend, and by how many tokens at most."""
        limit = min(proposer.limit, self.max_tokens)
        if not limit:
            return [], 0
        if self.always or proposer.free:
            if self.ledgers[FREE].suspended and not self.always:
                return [], 0
            members = [o for o in offers if o.room > o.tokens and (proposer.continues or not o.segments)]
            return members, limit
        if self.ledgers.setdefault(proposer.name, Ledger()).suspended:
            self.choices[f"{proposer.name} not asked: lost lately"] += 1
            return [], 0
        members, count = self._ask_if_worthwhile(proposer, offers, limit)
        if members:
            self._asked = proposer.name
        return members, count

    def asked(self, source: str, offers: list[Offer], count: int, seconds: float) -> None:
        """A proposer was asked for ``count`` tokens and took ``seconds``."""
        known = self._sources.setdefault(source, _Source())
        known.asked += 1
        known.seconds += seconds
        ids = {o.request.id for o in offers}
        # Meeting a request costs a draft model its prompt, which says nothing about the next time.
        if ids <= known.met:
            self.asking.record(source, len(offers), count, seconds)
        known.met |= ids

    def take(self, offers: list[Offer]) -> list[int]:
        """How many tokens of each offer to verify."""
        self.acceptance.tick()
        self._since_plain += 1
        if self.always:
            return [o.tokens for o in offers]
        kept = [0] * len(offers)
        if self._plain is None or not any([o.segments for o in offers]):
            self._chose("nothing proposed", 0)
            return kept
        chances = draft_plan.reach(offers, self.acceptance)
        ranking = draft_plan.ranked(chances)
        plan, why = self._best(ranking), "pays"
        if not plan.drafts:
            plan, why = self._retry_plan(ranking)
        else:
            self._retry, self._retry_at = self.RETRY, min(self._retry_at, self.acceptance.now + self.RETRY)
            self._paying += 1
            if self._paying % self.VARY == 0:
                why = "measuring drafted"
                factor = self.VARIED[self._paying // self.VARY % len(self.VARIED)]
                plan.drafts = max(1, min(round(plan.drafts * factor), len(ranking)))
        if plan.drafts:
            kept = draft_plan.kept(chances, plan.drafts)
        self._chose(why, plan.drafts, plan)
        return kept

    def learn(self, offer: Offer, new: list[int], verified: int) -> None:
        """``new`` are the tokens that a step gave the request of ``offer``, of which ``verified`` drafts were verified.

        What was offered is compared with what came, whether it was verified or not.
        """
        if offer.dropped:
            self._learn_chances(offer.request.id, offer.dropped, new)
        stood = self._learn_chances(offer.request.id, offer.segments, new)
        begin = 0
        for segment in offer.segments:
            end = begin + len(segment.tokens)
            counters = self._sources.setdefault(segment.source, _Source())
            counters.tokens += max(0, min(verified, end) - begin)
            counters.accepted += max(0, min(stood, verified, end) - begin)
            begin = end
        if verified:
            self.lengths[verified] += 1

    def _learn_chances(self, request_id: str, segments: list[Segment], new: list[int]) -> int:
        """Compares ``segments`` with the tokens that came; returns how many of theirs would have stood."""
        offered = [token for segment in segments for token in segment.tokens]
        compared = min(len(offered), len(new))
        stood = next((i for i in range(compared) if offered[i] != new[i]), compared)
        tried = min(stood + 1, compared)
        begin = 0
        for segment in segments:
            end = begin + len(segment.tokens)
            if tried > begin:
                accepted = min(stood, end) - begin
                self.acceptance.learn(request_id, segment.source, segment.grade, accepted, min(tried, end) - begin)
            begin = end
        return stood

    def record(self, batch: int, rows: int, gained: int, seconds: float, looking: float) -> None:
        """A step in which every request generated: ``rows`` computed, ``gained`` tokens, its time without and that of
        looking for drafts.
        """
        self.steps += 1
        self.drafted_steps += rows > batch
        plain = self._plain
        if plain is not None:
            worth, expected = gained / batch * plain, self.costs.expected(batch, rows - batch)
            # The noise of a step without drafts has nothing to do with looking, nor has a hiccup of the machine.
            spent = expected
            if rows > batch:
                forgiven, self._slow = not self._slow, seconds > 2 * expected
                spent = 2 * expected if self._slow and forgiven else seconds
            self._book(worth, spent + looking, plain)
            self.rhythm.looked(batch, worth > spent + looking)
        self.costs.record(batch, rows, seconds, looked=True)

    def disturbed(self, looking: float) -> None:
        """A step whose own time says nothing took so long for looking for drafts."""
        if self._plain is not None:
            self._book(0.0, looking, self._plain)

    def _book(self, worth: float, spent: float, plain: float) -> None:
        for name, ledger in self.ledgers.items():
            if name == self._asked:
                ledger.looked(worth, spent, plain)
            else:
                ledger.stepped_aside(plain)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.acceptance.forget(request_id)
        self.rhythm.request_ended()
        for source in self._sources.values():
            source.met.discard(request_id)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _pause(self, batch: int) -> tuple[str, int]:
        """Why steps from now on should not look for drafts, and how many."""
        if not self.max_tokens:
            return "turned off", self.rhythm.MOST
        refresh = min(self.REFRESH, self.SOON * self.costs.measured(batch))
        if self._plain is None or self._since_plain >= refresh:
            return "measuring plain", 1
        if all([ledger.suspended for ledger in self.ledgers.values()]):
            return "lost lately", self.rhythm.MOST
        return "resting", self.rhythm.pause(batch, self.acceptance.now)

    def _best(self, ranking: list[float], proposing: float = 0.0, doubt: float = 1.0) -> Plan:
        return draft_plan.best(ranking, self._batch, self.costs, margin=self.MARGIN, proposing=proposing, doubt=doubt)

    def _retry_plan(self, ranking: list[float]) -> tuple[Plan, str]:
        """Drafts are too dear at the measured costs; now and then what was measured is doubted."""
        hopeful = self._best(ranking, doubt=0.5)
        if hopeful.drafts and self._try_again():
            hopeful.drafts = max(1, min(hopeful.drafts, self.costs.fewest_extra(self._batch) // 2))
            return hopeful, "trying again"
        return Plan(0, self._batch, self._plain or 1.0), "too dear" if hopeful.drafts else "unlikely to stand"

    def _try_again(self) -> bool:
        now = self.acceptance.now
        if now < self._retry_at:
            return False
        self._retry = min(2 * self._retry, self.RETRY_MOST)
        self._retry_at = now + self._retry
        return True

    def _ask_if_worthwhile(self, proposer: Proposer, offers: list[Offer], limit: int) -> tuple[list[Offer], int]:
        """Compares the best step without this proposer with the best one with it, for a few numbers of tokens."""
        source, plain = proposer.name, self._plain or 0.0
        chances = draft_plan.reach(offers, self.acceptance)
        found = asking.candidates(proposer, offers, chances, self.acceptance)
        members = found.offers
        if not members:
            self.choices[f"{source} not asked: unlikely to stand"] += 1
            return [], 0
        before = self._best(draft_plan.ranked(chances))
        without = before.rate * self.MARGIN
        # Most often not even all of its tokens, in the time of one, would do.
        most = before.tokens + sum(found.added(limit))
        if not found.replaced and most < without * (
            before.seconds + self.asking.seconds(source, len(members), 1, plain)
        ):
            self.choices[f"{source} not asked: too dear"] += 1
            return [], 0
        given = draft_plan.ranked([c for o, c in zip(offers, chances, strict=True) if id(o) not in found.replaced])

        def best_count(doubt: float) -> int:
            best, best_rate = 0, without
            for count in asking.counts(limit):
                seconds = doubt * self.asking.seconds(source, len(members), count, plain)
                ranking = sorted(given + found.added(count), reverse=True)
                plan = self._best(ranking, seconds, doubt)
                if plan.rate > best_rate:
                    best, best_rate = count, plan.rate
            return best

        count = best_count(1.0)
        if not count and self._try_again():
            count = best_count(0.5)
        if not count:
            self.choices[f"{source} not asked: too dear"] += 1
            return [], 0
        for offer in members:
            if id(offer) in found.replaced:
                offer.drop()
        return members, count

    def _chose(self, why: str, drafts: int, plan: Plan | None = None) -> None:
        self.choices[why] += 1
        self.last = {"batch": self._batch, "drafts": drafts, "why": why}
        if plan is not None and drafts and self._plain is not None:
            self.drafts += drafts
            gain = plan.rate * self._plain / self._batch
            self.last |= {"expected_tokens": round(plan.tokens, 2), "expected_gain": round(gain, 3)}

    # -- statistics ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters, what was chosen and why, and what is known about costs (milliseconds) and acceptance."""
        proposed = sum(s.tokens for s in self._sources.values())
        accepted = sum(s.accepted for s in self._sources.values())
        verified = sum(self.lengths.values())
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "proposed_tokens": proposed,
            "accepted_tokens": accepted,
            "acceptance_rate": accepted / proposed if proposed else 0.0,
            # Tokens that a request gets from a step with drafts, the one that is always right among them.
            "acceptance_length": 1 + accepted / verified if verified else 1.0,
            "seconds_gained": round(sum(ledger.gained for ledger in self.ledgers.values()), 3),
            "proposers": {
                name: {
                    "asked": s.asked,
                    "ms": round(1e3 * s.seconds / s.asked, 4) if s.asked else 0.0,
                    "proposed_tokens": s.tokens,
                    "accepted_tokens": s.accepted,
                    "acceptance_rate": round(s.accepted / s.tokens, 4) if s.tokens else 0.0,
                }
                for name, s in self._sources.items()
            },
            "choices": dict(self.choices),
            "lengths": {str(n): c for n, c in sorted(self.lengths.items())},
            "last": self.last,
            "step_ms": self.costs.table(),
        }
