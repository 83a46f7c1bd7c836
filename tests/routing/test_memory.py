"""Turns within a memory budget: nothing over it, nothing busy leaves, nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.routing.memory import PATIENCE_S, STAY_S, Moves, Room, Tenant, decide, never_fits

NOW = 1000.0
BUDGET = Room(100)


def up(name: str, need: int, **more) -> Tenant:
    return Tenant(name, need, **{"up": True, "used_at": NOW - 60, "up_at": NOW - 60, **more})


def asked(name: str, need: int, since: float = 0.0, **more) -> Tenant:
    return Tenant(name, need, asked_at=NOW - since, **more)


def test_who_fits_comes_up_and_nobody_leaves() -> None:
    assert decide([up("a", 40), asked("b", 60)], BUDGET, NOW) == Moves(wake=("b",))


def test_the_least_recently_used_makes_room() -> None:
    old, new = up("old", 50, used_at=NOW - 90), up("new", 50, used_at=NOW - 30)
    assert decide([new, old, asked("c", 50)], BUDGET, NOW) == Moves(sleep=("old",))


def test_no_more_leave_than_it_takes() -> None:
    """The oldest alone is too little, and with the next one the oldest is not needed any more."""
    tenants = [up("small", 10, used_at=NOW - 90), up("large", 60, used_at=NOW - 30), asked("c", 60)]
    assert decide(tenants, BUDGET, NOW) == Moves(sleep=("large",))


def test_nobody_leaves_for_who_would_not_fit_even_so() -> None:
    tenants = [up("idle", 30), up("busy", 60, busy=True), asked("c", 50)]
    assert decide(tenants, BUDGET, NOW) == Moves()


def test_who_is_leaving_is_waited_for() -> None:
    assert decide([up("a", 60, leaving=True), up("b", 40), asked("c", 60)], BUDGET, NOW) == Moves()


def test_busy_pinned_and_young_ones_stay() -> None:
    for kept in ({"busy": True}, {"pinned": True}, {"up_at": NOW - STAY_S / 2}, {"used_at": NOW}):
        assert decide([up("a", 60, **kept), asked("b", 60)], BUDGET, NOW).sleep == ()


def test_behind_who_waits_only_those_pass_that_fit_beside_the_busy() -> None:
    tenants = [up("busy", 60, busy=True), asked("large", 60, since=3), asked("small", 30, since=1)]
    assert decide(tenants, BUDGET, NOW) == Moves(wake=("small",))


def test_a_long_wait_closes_the_busy_and_the_door_behind_it() -> None:
    tenants = [up("busy", 60, busy=True), asked("large", 60, since=PATIENCE_S), asked("small", 30, since=1)]
    assert decide(tenants, BUDGET, NOW) == Moves(close=("busy",))


def test_nobody_leaves_for_what_answers_do_not_need() -> None:
    assert decide([up("a", 60), asked("draft", 60, since=99, optional=True)], BUDGET, NOW) == Moves()


def test_room_of_pinned_ones_is_kept_while_they_are_down() -> None:
    pinned = Tenant("pinned", 60, pinned=True)
    assert never_fits(Tenant("a", 50), [pinned], BUDGET)
    assert decide([pinned, asked("b", 40), asked("c", 10)], BUDGET, NOW) == Moves(wake=("b",))
    assert decide([replace(pinned, asked_at=NOW), up("b", 40)], BUDGET, NOW) == Moves(wake=("pinned",))


def test_of_pinned_ones_the_first_stays() -> None:
    assert never_fits(asked("late", 60, pinned=True), [up("first", 60, pinned=True)], BUDGET)


def test_a_machine_that_is_short_delays_a_start_whatever_the_budget() -> None:
    short = Room(100, spare=20)
    assert decide([asked("a", 30)], short, NOW) == Moves()
    # Who is up holds 10 of its 40, and will take the rest.
    assert decide([up("b", 40, held=10, busy=True), asked("a", 10)], Room(100, spare=35), NOW) == Moves()


def test_who_has_grown_over_the_budget_sends_idle_ones_away() -> None:
    assert decide([up("a", 40, held=70, busy=True), up("b", 40)], BUDGET, NOW) == Moves(sleep=("b",))


def test_shares_of_a_gpu_take_turns_as_well() -> None:
    tenants = [up("a", 0, gpu=0.7), asked("b", 0, gpu=0.3), asked("c", 0, since=1, gpu=0.4)]
    assert decide(tenants, BUDGET, NOW) == Moves(sleep=("a",))
    assert decide([up("a", 0, gpu=0.7), asked("b", 0, gpu=0.3)], BUDGET, NOW) == Moves(wake=("b",))


@dataclass
class Machine:
    """Workers that come up and go within a step or some, and requests that take as long as they say."""

    tenants: list[Tenant]
    left: dict[str, float] = field(default_factory=dict)  # seconds of work under way
    waits: dict[str, float] = field(default_factory=dict)  # since when, by name
    longest: float = 0.0
    answered: int = 0
    now: float = 0.0
    arrivals: dict[str, float] = field(default_factory=dict)

    def ask(self, name: str, seconds: float) -> None:
        self.arrivals[name] = max(seconds, self.arrivals.get(name, 0.0))

    def step(self, dt: float) -> None:
        self.now += dt
        for t in self.tenants:
            if t.name in self.left:
                self.left[t.name] -= dt
                t.used_at = self.now
                if self.left[t.name] <= 0:
                    del self.left[t.name]
            t.busy = t.name in self.left
            if t.up and (t.leaving or t.closed) and not t.busy:
                t.up = t.leaving = t.closed = False
            if t.name in self.arrivals:
                if t.up and not t.closed and not t.leaving:
                    self.left[t.name] = max(self.left.get(t.name, 0.0), self.arrivals.pop(t.name))
                    t.busy, t.asked_at, t.used_at = True, None, self.now
                    self.longest = max(self.longest, self.now - self.waits.pop(t.name, self.now))
                    self.answered += 1
                elif t.asked_at is None:
                    t.asked_at = self.waits[t.name] = self.now
        self._apply(decide(self.tenants, BUDGET, self.now))
        assert sum(t.room for t in self.tenants if t.up) <= BUDGET.memory

    def _apply(self, moves: Moves) -> None:
        by_name = {t.name: t for t in self.tenants}
        for name in moves.wake:
            assert not by_name[name].up
            by_name[name].up, by_name[name].up_at = True, self.now
        for name in moves.sleep:
            found = by_name[name]
            assert found.up and not found.busy and not found.pinned and self.now - found.up_at >= STAY_S
            found.leaving = True
        for name in moves.close:
            assert by_name[name].up and not by_name[name].pinned
            by_name[name].closed = True


REQUEST_S = 3.0
worlds = st.lists(st.tuples(st.integers(1, 100), st.booleans()), min_size=2, max_size=6)
orders = st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, REQUEST_S)), min_size=20, max_size=200)


@given(worlds, orders)
def test_within_the_budget_and_in_bounded_time(world: list[tuple[int, bool]], order: list[tuple[int, float]]) -> None:
    """Whatever is asked for, also without a pause: what fits at all is answered within the turns of the others."""
    kept = world[0][0] < 50
    tenants = [Tenant(str(i), need, pinned=kept and i == 0) for i, (need, _) in enumerate(world)]
    machine = Machine(tenants)
    if kept:
        tenants[0].up = True
    able = [t.name for t in tenants if not never_fits(t, tenants, BUDGET)]
    for who, seconds in order:
        if able:
            machine.ask(able[who % len(able)], seconds)
        machine.step(1.0)
    for _ in range(400):
        if not machine.arrivals:
            break
        machine.step(1.0)
    assert not machine.arrivals
    assert machine.longest <= len(tenants) * (PATIENCE_S + STAY_S + REQUEST_S + 4)


def test_nobody_starves_beside_one_that_always_has_work() -> None:
    machine = Machine([Tenant("a", 60), Tenant("b", 60)])
    machine.ask("a", 1.0)
    for _ in range(10):
        machine.step(1.0)
    for _ in range(200):
        machine.ask("a", 2.0)
        machine.ask("b", 2.0)
        machine.step(1.0)
    assert machine.longest <= PATIENCE_S + STAY_S + 10
    assert machine.answered > 50
