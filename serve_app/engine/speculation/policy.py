"""The numbers by which the controller decides. At the value in brackets a term has no effect: what it earns is measured
by ``python -m benchmarks ablation``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Policy:
    # What drafting may lose in advance, and what it may lose again of what it gained, in plain steps; and always, as a
    # share of the time. [debt: infinite]
    debt: float = 2.0
    credit: float = 16.0
    share: float = 0.0025
    # Each proposer that takes time has a budget of its own. [False]
    own_budgets: bool = True
    # Plain steps in a row while all budgets are used up.
    rest: int = 16
    # One step in so many is a plain one, to measure what drafting is compared with. [0]
    refresh: int = 64
    # Where drafts have been too dear for so many steps they are tried again, then after twice as many, and so on. [0]
    retry: int = 16
    # Chances go back to the prior by this factor per step, so that a proposer gets another chance. [1]
    fade: float = 0.999
    # A request's own acceptance counts like that of all once so many tokens were tried in it. [infinite]
    own_weight: float = 1.5
    # Drafts of different grades are judged apart. [False]
    grades: bool = True
    # A draft whose next token is less likely to stand, by so much, is replaced by a better proposer's. [infinite]
    replace_below: float = 0.1
    # Rows cost what was measured for about so many, and not what a line through all measurements says. [False]
    cost_curve: bool = True
