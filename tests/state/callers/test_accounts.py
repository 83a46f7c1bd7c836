"""Accounts and keys: kept as hashes, changed from the command line, found in memory."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from serve_app.api.errors import AccountForbidden, AuthError, StoreAway
from serve_app.cli import main
from serve_app.gateway.http.auth import authenticate
from serve_app.state.callers.accounts import Account, Caller, Key, hash_key
from serve_app.state.callers.book import AccountBook
from serve_app.state.errors import AccountsError
from tests.state.gateways import OWN, who


class Filled:
    """A book with what the store has at each look."""

    def __init__(self, store) -> None:
        self._store = store
        self._book = AccountBook("local", (hash_key(OWN),))

    def find(self, key: str) -> Caller | None:
        self._book.fill(self._store.accounts.all())
        return self._book.find(key)


@pytest.fixture
def book(store):
    return Filled(store)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_good_once_it_is_added_and_no_more_once_it_is_removed(store, book):
    accounts = store.accounts
    assert who(book.find(OWN)) == ("local", 1.0, "realtime")
    key = accounts.add("team-a", weight=3)
    other = accounts.add("team-a", priority="batch")
    assert who(book.find(key)) == ("team-a", 3.0, "realtime")
    assert who(book.find(other)) == ("team-a", 3.0, "batch")
    assert book.find(key + "x") is None and book.find("") is None
    accounts.remove("team-a", hash_key(key)[:12])
    assert book.find(key) is None and book.find(other) is not None
    accounts.remove("team-a")
    assert book.find(other) is None and who(book.find(OWN)) == ("local", 1.0, "realtime")
    assert accounts.all() == {}


def test_every_change_has_a_revision_of_its_own(store):
    seen = [store.revisions().get("accounts", 0)]

    def changed() -> bool:
        seen.append(store.revisions()["accounts"])
        return seen[-1] > seen[-2]

    key = store.accounts.add("team-a")
    assert changed()
    store.accounts.add("team-a", weight=2)
    assert changed()
    store.accounts.remove("team-a", hash_key(key)[:12])
    assert changed()
    store.accounts.remove("team-a")
    assert changed()
    with pytest.raises(AccountsError):
        store.accounts.remove("team-a")
    assert not changed()


def test_the_account_of_the_settings_may_have_a_weight_and_more_keys(store, book):
    key = store.accounts.add("local", weight=5, priority="batch")
    assert who(book.find(OWN)) == ("local", 5.0, "realtime")
    assert who(book.find(key)) == ("local", 5.0, "batch")


def test_what_another_store_had_leaves_what_is_here(store):
    store.accounts.add("team-a", weight=2)
    foreign = Key("0" * 12, "0" * 64, "batch", "2026-01-02")
    store.accounts.take([Account("team-a", 7.0, (foreign,)), Account("team-b", 7.0)])
    found = store.accounts.all()
    assert (found["team-a"].weight, found["team-b"].weight) == (2.0, 7.0)
    assert foreign in found["team-a"].keys and len(found["team-a"].keys) == 2


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2000.0, True])
def test_weights_and_names_have_bounds(store, weight):
    with pytest.raises(AccountsError, match="weight"):
        store.accounts.add("team-a", weight=weight)
    for name in ("", "a/b", "x" * 65, "é", "a\n"):
        with pytest.raises(AccountsError, match="no account name"):
            store.accounts.add(name)
    assert store.accounts.all() == {}


def test_keys_open_their_own_account_only(store):
    key = store.accounts.add("team-a")
    book = AccountBook("local", (hash_key(OWN),))
    book.fill(store.accounts.all())
    assert authenticate(bearer(key), book, "team-a").account == "team-a"
    assert authenticate(bearer(key), book).account == "team-a"
    with pytest.raises(AccountForbidden):
        authenticate(bearer(key), book, "local")
    with pytest.raises(AuthError):
        authenticate(bearer("nonsense-nonsense-nonsense"), book, "team-a")
    # Two keys at once, as clients of the gateway host send them: the account in the path says whose counts.
    both = {**bearer("someone-elses-provider-key-000"), "cf-aig-authorization": f"Bearer {key}"}
    assert authenticate(both, book, "team-a").account == "team-a"
    # A gateway that could not read the store yet refuses nobody for good.
    book.blind = True
    with pytest.raises(StoreAway):
        authenticate(bearer("nonsense-nonsense-nonsense"), book)
    assert authenticate(bearer(OWN), book).account == "local"


def test_a_key_is_found_without_the_store(store):
    keys = [store.accounts.add(f"team-{n}") for n in range(20)]
    book = AccountBook("local", (hash_key(OWN),))
    book.fill(store.accounts.all())
    store.database.close()
    store.database._transaction = None  # whoever asks the store now fails
    assert [book.find(key).account for key in keys] == [f"team-{n}" for n in range(20)]


def test_changes_at_the_same_time_lose_nothing(store, open_store):
    stores = [store, open_store("elsewhere")]

    def add(n: int) -> None:
        stores[n % 2].accounts.add("one" if n < 8 else f"team-{n}")

    threads = [threading.Thread(target=add, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.accounts.all()
    assert len(found["one"].keys) == 8 and len(found) == 9


def test_the_command_line(store, database, book, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERVE_APP_DATABASE", database)
    assert main(["accounts", "add", "team-a", "--weight", "2", "--priority", "batch"]) == 0
    key = capsys.readouterr().out.strip()
    assert who(book.find(key)) == ("team-a", 2.0, "batch")
    assert main(["accounts", "list"]) == 0
    listed = capsys.readouterr().out
    assert "team-a" in listed and hash_key(key)[:12] in listed and key not in listed
    assert main(["accounts", "remove", "team-b"]) == 2
    assert "no account" in capsys.readouterr().err
    assert main(["accounts", "add", "a/b"]) == 2
    assert main(["accounts", "remove", "team-a", "--key", "000000000000"]) == 2
    assert main(["accounts", "remove", "team-a", "--key", hash_key(key)[:12]]) == 0
    assert book.find(key) is None


def test_the_command_line_needs_no_torch_and_no_ray():
    code = (
        "import sys, serve_app.cli, serve_app.state.store.sql\n"
        "sys.exit(any(m in sys.modules for m in ('ray', 'torch', 'transformers', 'alembic', 'psycopg')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
