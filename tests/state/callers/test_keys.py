"""Keys and members in the store: made, changed, rolled, ended, and an entry of who did it."""

from __future__ import annotations

import json
import threading
import time
import timeit

import pytest

from serve_app import Accounts
from serve_app.cli import main
from serve_app.state.callers.accounts import ALL_SCOPES, USUAL_SCOPES, hash_key
from serve_app.state.callers.audit import Actor
from serve_app.state.callers.book import AccountBook
from serve_app.state.callers.limits import KINDS, Limits, read_limits
from serve_app.state.errors import AccountsError, Missing, Taken
from tests.state.gateways import OWN, Gateways
from tests.waiting import until

ANN = Actor("0123456789ab", "api", "r1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def look(store, clock):
    """The book as it is after a look at the store."""
    book = AccountBook("local", (hash_key(OWN),), clock)

    def filled() -> AccountBook:
        book.fill(store.accounts.all())
        return book

    return filled


def test_a_key_has_scopes_a_name_and_limits_and_callers_tell_of_them(store, look):
    store.accounts.create("team-a", label="Team A", weight=2, limits={"neurons_per_day": "10000"})
    limits = {"requests_per_minute": 60, "money_per_month": "12.50"}
    key, value = store.accounts.keys.create("team-a", name="ci", scopes=["read"], priority="batch", limits=limits)
    caller = look().find(value)
    assert (caller.key, caller.scopes, caller.priority) == (key.id, {"read"}, "batch")
    assert caller.limits == Limits(requests_per_minute=60, money_per_month=12_500_000_000)
    assert caller.account_limits == Limits(neurons_per_day=10_000_000_000)
    assert caller.limits.shown() == {"requests_per_minute": 60, "money_per_month": "12.5"}
    # Whoever says nothing gets what keys could before there were scopes; the key of the settings may do everything.
    plain = store.accounts.add("team-a")
    assert look().find(plain).scopes == USUAL_SCOPES
    assert look().find(OWN).scopes == ALL_SCOPES and look().find(OWN).key == hash_key(OWN)[:12]
    stored = store.accounts.get("team-a")
    assert (stored.label, [k.name for k in stored.keys if k.name]) == ("Team A", ["ci"])
    assert value not in json.dumps([vars_of(k) for k in stored.keys])


def vars_of(key) -> dict[str, str]:
    return {name: str(getattr(key, name)) for name in key.__slots__}


def test_a_rolled_key_keeps_its_id_and_settings_and_its_old_value_opens_nothing(store, look):
    store.accounts.create("team-a")
    key, old = store.accounts.keys.create("team-a", name="ci", scopes=["inference"])
    assert look().find(old).key == key.id
    new = store.accounts.keys.roll("team-a", key.id)
    book = look()
    assert book.find(old) is None and book.why_not(old) is None
    assert book.find(new).key == key.id and book.find(new).scopes == {"inference"}
    store.accounts.keys.remove("team-a", key.id)
    assert look().find(new) is None
    with pytest.raises(Missing):
        store.accounts.keys.roll("team-a", key.id)


def test_a_key_opens_nothing_before_it_starts_after_it_expired_and_while_it_is_disabled(store, look, clock):
    store.accounts.create("team-a")
    key, value = store.accounts.keys.create("team-a", starts=1010.0, expires=1020.0)
    book = look()
    for now, good, why in ((1009.9, False, "valid from"), (1010.0, True, None), (1020.0, False, "has expired")):
        clock.now = now
        assert (book.find(value) is not None) is good
        assert (why is None) if good else why in (book.why_not(value) or "")
    assert book.key(look().own(key.id)).status(1020.0) == "expired"
    clock.now = 1015.0
    store.accounts.keys.change("team-a", key.id, enabled=False)
    assert look().find(value) is None and "disabled" in look().why_not(value)
    changed = store.accounts.keys.change("team-a", key.id, enabled=True, expires=None)
    clock.now = 9e9
    assert look().find(value) is not None and changed.expires is None and changed.starts == 1010.0


def test_members_bound_what_their_keys_may_do_and_take_them_along(store, look):
    store.accounts.create("team-a")
    ann = store.accounts.members.create("team-a", "ann@example.com", ["read"])
    _, value = store.accounts.keys.create("team-a", scopes=["inference", "read"], member=ann.id)
    other = store.accounts.add("team-a")
    assert look().find(value).scopes == {"read"} and look().find(value).member == ann.id
    store.accounts.members.change("team-a", ann.id, ["inference", "admin"])
    assert look().find(value).scopes == {"inference"}
    with pytest.raises(Taken):
        store.accounts.members.create("team-a", "ann@example.com", ["read"])
    with pytest.raises(Missing):
        store.accounts.keys.create("team-a", member="nobody")
    store.accounts.members.remove("team-a", ann.id)
    assert look().find(value) is None and look().find(other) is not None
    assert store.accounts.get("team-a").members == ()


@pytest.mark.parametrize(
    "fields",
    [{"scopes": []}, {"scopes": ["all"]}, {"priority": "high"}, {"limits": {"cows": 1}}, {"limits": {"streams": -1}},
     {"limits": {"streams": 1.5}}, {"limits": {"neurons_per_day": "0.0000001"}}, {"limits": {"streams": True}},
     {"limits": {"plan": "paid"}},
     {"name": "x" * 121}, {"name": "a\nb"}, {"expires": float("inf")}, {"colour": "red"}],
    ids=str,
)  # fmt: skip
def test_what_no_key_can_have(store, fields):
    store.accounts.create("team-a")
    with pytest.raises(AccountsError):
        store.accounts.keys.create("team-a", **fields)
    assert store.accounts.get("team-a").keys == ()


def test_a_key_has_its_accounts_plan(store):
    store.accounts.create("team-a", limits={"plan": "free"})
    key, _ = store.accounts.keys.create("team-a", limits={"streams": 3, "plan": None})
    with pytest.raises(AccountsError, match="plan is a limit of accounts.*Change the account"):
        store.accounts.keys.change("team-a", key.id, limits={"plan": "paid"})
    assert store.accounts.get("team-a").keys[0].limits == Limits(streams=3)


def test_limits_are_exact_and_taken_away_by_none():
    before = read_limits({"money_per_month": "0.000000001", "neurons_per_day": 0.1, "streams": "4"})
    assert before == Limits(streams=4, neurons_per_day=100_000, money_per_month=1)
    assert Limits.of_stored(before.stored()) == before and read_limits(before.shown()) == before
    assert read_limits({"streams": None}, before) == Limits(neurons_per_day=100_000, money_per_month=1)
    assert not Limits() and before and Limits.of_stored('{"later": 5, "streams": 1}') == Limits(streams=1)


def test_every_change_has_an_entry_of_who_made_it_and_no_key_is_in_it(store):
    accounts = store.accounts
    accounts.create("team-a", weight=2, by=ANN)
    key, value = accounts.keys.create("team-a", scopes=["read"], by=ANN)
    accounts.keys.change("team-a", key.id, scopes=["inference"], limits={"streams": 3}, by=ANN)
    rolled = accounts.keys.roll("team-a", key.id, by=ANN)
    accounts.change("team-a", weight=3, by=ANN)
    member = accounts.members.create("team-a", "ann@example.com", ["read"], by=ANN)
    accounts.members.remove("team-a", member.id, by=ANN)
    accounts.keys.remove("team-a", key.id, by=ANN)
    accounts.remove("team-a", by=ANN)
    accounts.create("team-b")
    found = accounts.audit.read("team-a", oldest_first=True)
    assert [(c.action, c.kind) for c in found] == [
        ("create", "account"), ("create", "key"), ("update", "key"), ("roll", "key"), ("update", "account"),
        ("create", "member"), ("delete", "member"), ("delete", "key"), ("delete", "account"),
    ]  # fmt: skip
    assert {c.by for c in found} == {ANN} and {c.account for c in found} == {"team-a"}
    assert found[2].changes == {"scopes": (["read"], ["inference"]), "limits": ({}, {"streams": 3})}
    assert found[4].changes == {"weight": (2.0, 3.0)}
    told = str(found)
    assert not any(secret in told for secret in (value, hash_key(value), rolled, hash_key(rolled)))
    # Page by page, in either direction, and by time.
    pages = []
    while page := accounts.audit.read("team-a", limit=4, after=pages[-1].id if pages else ""):
        pages += page
    assert pages == found[::-1]
    assert accounts.audit.read(since=found[4].at, before=found[5].at, oldest_first=True) == [found[4]]
    assert len(accounts.audit.read()) == 10
    # A change that is refused leaves none.
    with pytest.raises(Missing):
        accounts.change("team-a", weight=5)
    assert len(accounts.audit.read()) == 10


def test_changes_of_one_key_at_the_same_time_lose_nothing(store, open_store):
    store.accounts.create("team-a")
    key, _ = store.accounts.keys.create("team-a")
    stores = [store, open_store("elsewhere")]

    def change(n: int) -> None:
        stores[n % 2].accounts.keys.change("team-a", key.id, limits={KINDS[n]: n})
        stores[n % 2].accounts.change("team-a", limits={KINDS[n]: n})

    threads = [threading.Thread(target=change, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account = store.accounts.get("team-a")
    wanted = read_limits({kind: n for n, kind in enumerate(KINDS[:5])})
    assert account.keys[0].limits == account.limits == wanted
    assert len(store.accounts.audit.read("team-a")) == 12


async def test_the_last_use_reaches_the_store_from_the_background(database, tmp_path, open_store, monkeypatch):
    monkeypatch.setattr("serve_app.state.state.CLOSE_S", 60.0)
    with Gateways(database, tmp_path) as gateways:
        store = open_store("elsewhere")
        key = store.accounts.add("team-a")
        state = gateways.make("one")
        await state.start()
        before = store.revisions()
        [known] = store.accounts.get("team-a").keys
        assert known.used is None and state.accounts.find(key) is not None
        await until(lambda: store.accounts.get("team-a").keys[0].used is not None)
        first = store.accounts.get("team-a").keys[0].used
        # The gateway notes it a moment after the store has it.
        await until(lambda: state.accounts.untold() == {})
        # Once in a while is enough, and no gateway reads the accounts again for it. What is left is told at the end.
        assert state.accounts.find(key) is not None and state.accounts.untold() == {}
        assert store.revisions() == before
        state.close()
        assert store.accounts.get("team-a").keys[0].used > first
        store.accounts.keys.used({known.id: 5.0})
        assert store.accounts.get("team-a").keys[0].used > first


def test_a_key_is_found_in_microseconds(store, look):
    keys = [store.accounts.add(f"team-{n % 5}") for n in range(50)]
    book = look()
    # Of the processor's time, and the least of several: what else the machine does counts for nothing.
    took = timeit.repeat(lambda: [book.find(key) for key in keys], number=20, repeat=9, timer=time.thread_time)
    assert min(took) / 20 / len(keys) < 20e-6


def test_the_command_line(store, database, look, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERVE_APP_DATABASE", database)

    def said(*words: str, status: int = 0) -> str:
        assert main(["accounts", *words]) == status
        told = capsys.readouterr()
        return told.err if status else told.out.strip()

    value = said("add", "team-a", "--name", "ci", "--scopes", "inference", "--limit", "streams=3")
    caller = AccountBook("local", ())
    caller.fill(store.accounts.all())
    key = caller.find(value)
    assert key.scopes == {"inference"} and key.limits.streams == 3
    said("member", "team-a", "ann@example.com", "--scopes", "read,admin")
    hers = said("add", "team-a", "--member", "ann@example.com", "--expires", "90d", "--scopes", "read")
    listed = said("list")
    assert "ann@example.com" in listed and key.key in listed and "expires" in listed and "streams=3" in listed
    assert value not in listed and hers not in listed
    said("change", "team-a", "--key", key.key, "--limit", "streams=", "--disable", "--expires", "never")
    said("change", "team-a", "--weight", "3", "--label", "Team A", "--limit", "neurons_per_day=10000")
    [account] = json.loads(said("list", "--json"))
    assert (account["weight"], account["label"], account["limits"]) == (3.0, "Team A", {"neurons_per_day": "10000"})
    [shown] = [each for each in account["keys"] if each["id"] == key.key]
    assert shown["limits"] == {} and shown["status"] == "disabled" and "hash" not in shown
    said("change", "team-a", "--key", key.key, "--enable")
    rolled = said("roll", "team-a", key.key)
    assert rolled != value
    assert "belongs to a key" in said("change", "team-a", "--scopes", "read", status=2)
    assert "no scope 'write'" in said("add", "team-a", "--scopes", "write", status=2)
    assert "past" in said("add", "team-a", "--expires", "2020-01-01", status=2)
    assert "is no time" in said("add", "team-a", "--expires", "soon", status=2)
    assert "no member" in said("add", "team-a", "--member", "bob@example.com", status=2)
    said("remove", "team-a", "--member", "ann@example.com")
    assert len(store.accounts.get("team-a").keys) == 1
    entries = [json.loads(line) for line in said("audit", "team-a", "--json", "--since", "1h").splitlines()]
    assert {entry["via"] for entry in entries} == {"cli"} and entries[0]["action"] == "delete"
    assert "roll key" in said("audit") and value not in said("audit")
    with pytest.raises(SystemExit):
        main(["accounts", "--help"])
    helped = capsys.readouterr().out
    assert "examples:" in helped and all(scope in helped for scope in ALL_SCOPES)


def test_python(store, database, look, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_APP_DATABASE", database)
    with Accounts(tmp_path / "home") as accounts:
        key, value = accounts.make_key("team-a", name="ci", scopes=["inference"])
        assert look().find(value).key == key.id
        accounts.change("team-a", weight=2)
        member = accounts.add_member("team-a", "ann@example.com", ["read"])
        accounts.change_member("team-a", member.id, ["admin"])
        accounts.remove_member("team-a", member.id)
        assert accounts.change_key("team-a", key.id, name="other").name == "other"
        rolled = accounts.roll_key("team-a", key.id)
        assert look().find(rolled).weight == 2.0
        accounts.end_key("team-a", key.id)
        assert accounts.get("team-a").keys == () and list(accounts.list()) == ["team-a"]
        accounts.remove("team-a")
        assert {change.by.via for change in accounts.audit()} == {"python"} and len(accounts.audit(limit=3)) == 3
