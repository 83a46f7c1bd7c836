"""Accounts and keys: kept as hashes, changed from the command line, taken up by a running gateway."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

import pytest

from serve_app.api.errors import AccountForbidden, AuthError
from serve_app.cli import main
from serve_app.gateway.http.auth import authenticate
from serve_app.state import accounts
from serve_app.state.accounts import AccountBook, AccountsError, AccountsFile, Caller, hash_key, read_accounts

OWN = "the-key-of-the-settings-0123456789"


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setattr(accounts, "LOOK_AGAIN_S", 0.0)
    return AccountBook(tmp_path / accounts.FILE, "local", (hash_key(OWN),))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_good_once_it_is_added_and_no_more_once_it_is_removed(tmp_path, book):
    assert book.find(OWN) == Caller("local")
    file = AccountsFile(tmp_path)
    key = file.add("team-a", weight=3)
    other = file.add("team-a", priority="batch")
    assert book.find(key) == Caller("team-a", 3.0, "realtime")
    assert book.find(other) == Caller("team-a", 3.0, "batch")
    assert book.find(key + "x") is None and book.find("") is None
    file.remove("team-a", hash_key(key)[:12])
    assert book.find(key) is None and book.find(other) is not None
    file.remove("team-a")
    assert book.find(other) is None and book.find(OWN) == Caller("local")


def test_the_file_holds_hashes_and_is_the_owners_alone(tmp_path):
    key = AccountsFile(tmp_path).add("team-a")
    path = tmp_path / accounts.FILE
    assert key not in path.read_text() and hash_key(key) in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".yaml"] == [accounts.FILE]


def test_the_account_of_the_settings_may_have_a_weight_and_more_keys(tmp_path, book):
    key = AccountsFile(tmp_path).add("local", weight=5, priority="batch")
    assert book.find(OWN) == Caller("local", 5.0, "realtime")
    assert book.find(key) == Caller("local", 5.0, "batch")


@pytest.mark.parametrize(
    "text",
    [
        "accounts: [1]",
        "- x",
        "accounts: {a: 3}",
        "accounts: {a: {keys: [{hash: abc}]}}",
        "accounts: {a: {weight: -1}}",
        "accounts: {a: {weight: .nan}}",
        "accounts: {a: {weight: true}}",
        "accounts: {'../x': {}}",
        "accounts: {a: {keys: [{hash: " + "0" * 64 + ", priority: first}]}}",
        "{",
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_an_error_for_people_and_no_change_for_the_gateway(tmp_path, book, text):
    key = AccountsFile(tmp_path).add("team-a")
    assert book.find(key) is not None
    (tmp_path / accounts.FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AccountsError):
        read_accounts(tmp_path / accounts.FILE)
    assert book.find(key) is not None and book.problem is not None
    os.unlink(tmp_path / accounts.FILE)
    assert book.find(key) is None and book.problem is None


def test_keys_open_their_own_account_only(tmp_path, book):
    key = AccountsFile(tmp_path).add("team-a")
    assert authenticate(bearer(key), book, "team-a").account == "team-a"
    assert authenticate(bearer(key), book).account == "team-a"
    with pytest.raises(AccountForbidden):
        authenticate(bearer(key), book, "local")
    with pytest.raises(AuthError):
        authenticate(bearer("nonsense-nonsense-nonsense"), book, "team-a")
    # Two keys at once, as clients of the gateway host send them: the account in the path says whose counts.
    both = {**bearer("someone-elses-provider-key-000"), "cf-aig-authorization": f"Bearer {key}"}
    assert authenticate(both, book, "team-a").account == "team-a"


def test_processes_that_add_at_the_same_time_lose_nothing(tmp_path):
    def add(n: int) -> None:
        AccountsFile(tmp_path).add(f"team-{n}")

    threads = [threading.Thread(target=add, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_accounts(tmp_path / accounts.FILE)) == 16


def test_the_command_line(tmp_path, monkeypatch, capsys, book):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    assert main(["accounts", "add", "team-a", "--weight", "2", "--priority", "batch"]) == 0
    key = capsys.readouterr().out.strip()
    assert book.find(key) == Caller("team-a", 2.0, "batch")
    assert main(["accounts", "list"]) == 0
    listed = capsys.readouterr().out
    assert "team-a" in listed and hash_key(key)[:12] in listed and key not in listed
    assert main(["accounts", "remove", "team-b"]) == 2
    assert "No account" in capsys.readouterr().err
    assert main(["accounts", "add", "a/b"]) == 2
    assert main(["accounts", "remove", "team-a", "--key", hash_key(key)[:12]]) == 0
    assert book.find(key) is None


def test_the_command_line_needs_no_torch_and_no_ray():
    code = (
        "import sys, serve_app.cli, serve_app.state.accounts; sys.exit(any(m in sys.modules for m in ('ray', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
