"""Who is no rank of a group, and wants to be: other processes of the same machine."""

from __future__ import annotations

import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from serve_app.parallel import meeting as meetings
from serve_app.parallel.life import Waiting
from serve_app.parallel.link import LOOPBACK
from serve_app.parallel.meeting import Meeting, NotARank, host_meeting, leave
from serve_app.parallel.place import Place
from tests.parallel.groups import CONTEXT, until


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    leave()


def join(place: Place, meeting: Meeting, token: str) -> None:
    meetings.join(place, torch.device("cpu"), meeting, token, waiting=Waiting(), agree=lambda ok: ok)


def _rank(meeting: Meeting, token: str, says: bool) -> None:
    """Rank 1, in a process of its own."""
    if not says:
        meetings._greet = lambda circle, own, token: None
    join(Place(2, 1, 1), meeting, token)
    # Until the test ends it.
    import time

    time.sleep(600)


def start(meeting: Meeting, token: str, says: bool = True) -> Any:
    process = CONTEXT.Process(target=_rank, args=(meeting, token, says), daemon=True)
    process.start()
    return process


def _listening(pid: int) -> set[Any]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}


def test_ranks_of_one_machine_meet_where_nobody_else_can_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    meeting = host_meeting(LOOPBACK, 2)
    folder = Path(meeting.file).parent
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = _listening(os.getpid())
    other = start(Meeting(LOOPBACK, file=meeting.file), "the token")
    join(Place(2, 1), meeting, "the token")
    opened = (_listening(os.getpid()) - before) | _listening(other.pid)
    assert opened and {address.ip for address in opened} <= {LOOPBACK, "::1"}, opened
    other.kill()
    other.join()
    leave()
    assert not folder.exists()


def test_the_store_of_several_machines_listens_at_its_own_address_alone() -> None:
    """It asks for no key."""
    before = _listening(os.getpid())
    meeting = host_meeting("127.0.0.2", 2)
    assert _listening(os.getpid()) - before == {("127.0.0.2", meeting.port)}


@pytest.mark.parametrize(("token", "says"), [("another", True), ("the token", False)])
def test_who_does_not_show_the_token_is_no_rank(monkeypatch: pytest.MonkeyPatch, token: str, says: bool) -> None:
    monkeypatch.setattr(meetings, "GREET", timedelta(seconds=20 if says else 1))
    meeting = host_meeting(LOOPBACK, 2)
    other = start(Meeting(LOOPBACK, file=meeting.file), token, says)
    with pytest.raises(NotARank):
        join(Place(2, 1), meeting, "the token")
    other.kill()
    until(lambda: not other.is_alive())
