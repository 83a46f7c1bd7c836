"""Drafts from what the same tenant was answered lately: agents get nearly the same answer again and again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from serve_app.engine.request import Request
from serve_app.engine.speculation.proposer import Draft

# Tokens that must agree: fewer would find anything anywhere.
SIZES = (8, 4)


@dataclass(slots=True)
class _Generation:
    """Answers, and where each run of tokens stands in them: hash -> (answer, position behind the run)."""

    tokens: int = 0
    runs: dict[int, tuple[list[int], int]] = field(default_factory=dict)

    def add(self, answer: list[int]) -> None:
        for size in SIZES:
            for position in range(size, len(answer)):
                self.runs[hash(tuple(answer[position - size : position]))] = (answer, position)
        self.tokens += len(answer)


@dataclass(slots=True)
class _Tenant:
    now: _Generation = field(default_factory=_Generation)
    before: _Generation = field(default_factory=_Generation)


class RecentProposer:
    """Continues a request as an earlier answer to the same tenant went on after the same tokens.

    Tenants are told apart by ``Request.root``, which their salt is part of: nobody's tokens, and nobody's timing,
    depend on another tenant's. Holds ``limit_tokens`` to twice as many tokens of each of the last ``tenants`` tenants.
    """

    name = "recent"
    free = continues = True

    def __init__(self, *, limit: int = 16, limit_tokens: int = 16384, tenants: int = 64) -> None:
        self.limit = limit
        self._limit_tokens = limit_tokens
        self._limit_tenants = tenants
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()
        self._requests: dict[str, Request] = {}

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        drafts = {}
        for request in requests:
            self._requests[request.id] = request
            tenant = self._tenants.get(request.root)
            if tenant is not None and (
                found := self._find(tenant, (request.tokens[-SIZES[0] :] + request.draft)[-SIZES[0] :])
            ):
                answer, position, grade = found
                drafts[request.id] = Draft(answer[position : position + count], grade)
        return drafts

    def forget(self, request_id: str) -> None:
        """The request's answer is what later ones may repeat."""
        request = self._requests.pop(request_id, None)
        if request is None or not request.output_len:
            return
        tenant = self._tenants.setdefault(request.root, _Tenant())
        self._tenants.move_to_end(request.root)
        tenant.now.add(request.tokens[max(0, request.prompt_len - SIZES[0]) :])
        if tenant.now.tokens >= self._limit_tokens:
            tenant.before, tenant.now = tenant.now, _Generation()
        if len(self._tenants) > self._limit_tenants:
            self._tenants.popitem(last=False)

    def _find(self, tenant: _Tenant, tokens: list[int]) -> tuple[list[int], int, int] | None:
        for grade, size in zip((1, 0), SIZES, strict=True):
            key = hash(tuple(tokens[-size:]))
            found = tenant.now.runs.get(key) or tenant.before.runs.get(key)
            if found is not None:
                return *found, grade
        return None
