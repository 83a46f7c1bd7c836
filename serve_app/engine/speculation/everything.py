"""The controller for measurements and tests: asks everybody, verifies everything."""

from __future__ import annotations

from typing import Any

from serve_app.engine.speculation.proposer import Proposal, Proposer


class VerifyEverything:
    """A :class:`~serve_app.engine.speculation.speculate.Controller` that learns nothing."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.steps = self.drafted_steps = 0

    def plain_steps(self, batch: int) -> int:
        return 0

    def ran_plain(self, batch: int, steps: int, seconds: float) -> None:
        self.steps += steps

    def ask(self, proposer: Proposer, proposals: list[Proposal]) -> tuple[list[Proposal], int]:
        members = [p for p in proposals if p.room > p.length and (proposer.continues or not p.drafts)]
        return members, min(proposer.limit, self.max_tokens)

    def asked(self, source: str, proposals: list[Proposal], count: int, seconds: float) -> None:
        pass

    def verify(self, proposals: list[Proposal]) -> list[int]:
        return [p.length for p in proposals]

    def learn(self, proposal: Proposal, new: list[int]) -> None:
        pass

    def record(self, batch: int, rows: int, gained: int, seconds: float, looking: float) -> None:
        self.steps += 1
        self.drafted_steps += rows > batch

    def disturbed(self, looking: float) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {"steps": self.steps, "drafted_steps": self.drafted_steps}
