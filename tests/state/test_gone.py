"""PostgreSQL and who uses it, where one of them is gone without a word: neither keeps the other waiting for hours."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from benchmarks.chaos.network import RETURN, SO_ATTACH_FILTER
from serve_app.state.errors import Away
from serve_app.state.store import database as module
from serve_app.state.store.database import Database
from tests.databases import empty_database
from tests.waiting import wait_for

LOCK = sa.text("SELECT pg_advisory_xact_lock(7)")


@pytest.fixture
def opened(request, tmp_path) -> Iterator[Callable[[str], Database]]:
    """``opened("?application_name=x")``: one more of the same empty database."""
    request.param, made = "postgresql", []
    with contextmanager(empty_database)(request, tmp_path) as url:

        def make(more: str = "") -> Database:
            made.append(Database(tmp_path, url + more, lambda _: None))
            return made[-1]

        yield make
        for one in made:
            one.close()


def test_what_a_process_that_hangs_has_locked_is_free_again(opened, monkeypatch):
    one, other = opened(), opened()
    with monkeypatch.context() as patched:
        patched.setattr(module, "IDLE_S", 2.0)
        one.engine.connect().close()
    free = False
    with pytest.raises(Away), one.writing() as hanging:
        hanging.execute(LOCK)
        with other.writing() as connection:
            connection.execute(LOCK)
        free = True
        hanging.execute(LOCK)
    assert free and one.away is not None and other.away is None


OWN = "?options=-c%20idle_in_transaction_session_timeout%3D7s"


@pytest.mark.parametrize(("more", "bound"), [("", "5s"), (OWN, "7s")])
def test_an_operators_own_bound_stays(opened, more, bound):
    with opened(more).reading() as connection:
        assert connection.scalar(sa.text("SHOW idle_in_transaction_session_timeout")) == bound
        assert connection.scalar(sa.text("SHOW tcp_keepalives_idle")) == "10"


def test_a_server_that_is_gone_is_noticed_by_who_waits_for_its_answer(opened, monkeypatch):
    """No packet of the server's comes any more: not even that the connection is over."""
    monkeypatch.setattr(module, "PROBE_S", 1)
    monkeypatch.setattr(module, "TIMEOUT_S", 1.0)
    one, other = opened(), opened()
    found: list[Away] = []
    sockets: list[int] = []

    def wait() -> None:
        with pytest.raises(Away) as told, one.reading() as connection:
            sockets.append(connection.connection.driver_connection.pgconn.socket)
            connection.execute(sa.text("SELECT pg_sleep(600)"))
        found.append(told.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()

    def sleeps() -> bool:
        with other.reading() as connection:
            asked = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
            return connection.scalar(asked) == 1

    wait_for(sleeps)
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
    with socket.socket(fileno=os.dup(sockets[0])) as copy:
        copy.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(nothing)))
    waiting.join(60)
    assert found and one.away is not None and other.away is None
