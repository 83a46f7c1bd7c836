"""The line between rank 0 and the others: who may come, that words arrive in order, and that an end is noticed."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from serve_app.parallel import door, link
from serve_app.parallel.frames import send
from serve_app.parallel.link import Follower, Leader, LinkAddress, RankLost
from serve_app.wire.ranks import RankAllocate, RankFailed, RankHello, RankMeeting, RankState
from tests.parallel.groups import until

MEETING = RankMeeting("127.0.0.1", 1, "")


def meet(ranks: int):
    """Rank 0's side and the others', in one process; what rank 0 says when one is lost."""
    lost, ended = [], []
    leader = Leader(ranks, on_lost=lost.append)
    followers: list[Follower] = []

    def come() -> None:
        for rank in range(ranks - 1, 0, -1):
            followers.append(Follower.connect(rank, leader.address, lambda: ended.append(1)))

    thread = threading.Thread(target=come)
    thread.start()
    leader.await_all(MEETING)
    thread.join()
    return leader, sorted(followers, key=lambda each: each.rank), lost, ended


def test_words_arrive_in_order_and_at_all_ranks():
    leader, followers, lost, _ = meet(3)
    for count in range(20):
        leader.tell(RankAllocate(count))
    for follower in followers:
        assert follower.next() == MEETING
        assert [follower.next() for _ in range(20)] == [RankAllocate(count) for count in range(20)]
    followers[1].say(RankState(2, 77, 1 << 20, 1.0, 0.5))
    until(lambda: leader.states()[1].get("memory_bytes") == 1 << 20)
    assert [state["rank"] for state in leader.states()] == [1, 2] and lost == []
    leader.close()


def test_rank_0_notices_who_ends_and_says_why():
    leader, followers, lost, _ = meet(3)
    followers[0].say(RankFailed(1, "OSError: no such weights"))
    until(lambda: leader.reason() != "")
    followers[0].line.shutdown(socket.SHUT_RDWR)
    until(lambda: lost)
    assert lost == [leader.reason()] and "rank 1 of 3" in lost[0] and "no such weights" in lost[0]
    with pytest.raises(RankLost, match="rank 1 of 3"):
        leader.await_loaded()
    leader.close()


def test_the_others_notice_that_rank_0_ends():
    leader, followers, _, ended = meet(3)
    leader.close()
    until(lambda: len(ended) == 2)
    assert followers[0].next() == MEETING and followers[0].next() is None


def test_strangers_are_not_ranks():
    """Another token, a number that is none, and bytes that are no message; who is meant comes in all the same."""
    leader = Leader(2, on_lost=lambda reason: None)
    address = leader.address
    wrong = LinkAddress(address.host, address.port, "0" * 32)

    def come() -> None:
        for rank, own in ((1, wrong), (0, address), (2, address)):
            with contextlib.suppress(OSError):
                line = socket.create_connection((address.host, address.port))
                send(line, RankHello(rank, own.token, 1))
        line = socket.create_connection((address.host, address.port))
        line.sendall(b"\xff\xff\xff\xffGET / HTTP/1.1")
        line.close()
        Follower.connect(1, address, lambda: None)

    threading.Thread(target=come).start()
    leader.await_all(MEETING)
    assert [state["rank"] for state in leader.states()] == [1]
    leader.close()


def test_strangers_who_say_little_hold_nobody_up(monkeypatch):
    """Silent ones, one that announces a gigabyte, one that stops within a word; more than are listened to."""
    monkeypatch.setattr(door, "MOST_STRANGERS", 4)
    leader = Leader(2, on_lost=lambda reason: None)
    where = leader.address.host, leader.address.port
    lines = [socket.create_connection(where) for _ in range(8)]
    lines[0].sendall(b"\0\0\0\x40")
    lines[1].sendall(b"\x20\0\0\0rank")

    def come() -> None:
        Follower.connect(1, leader.address, lambda: None)

    threading.Thread(target=come).start()
    leader.await_all(MEETING)
    assert [state["rank"] for state in leader.states()] == [1]
    for line in lines:  # all have been let go
        line.settimeout(30)
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""
        line.close()
    leader.close()


def test_who_speaks_another_language_is_lost():
    leader, followers, lost, _ = meet(3)
    followers[1].line.sendall(b"\x04\0\0\0what")
    until(lambda: lost)
    assert "rank 2 of 3" in lost[0] and "can't be read" in lost[0]
    leader.close()


def test_half_a_message_of_one_does_not_hide_the_end_of_another():
    leader, followers, lost, _ = meet(3)
    followers[0].line.sendall(b"\xff\0\0\0half")
    followers[1].line.shutdown(socket.SHUT_RDWR)
    until(lambda: lost)
    assert "rank 2 of 3" in lost[0]
    leader.close()


def test_all_ranks_agree_or_none_goes_on():
    leader, followers, _, _ = meet(3)

    def ask(*answers: bool) -> list[bool]:
        found: list[bool] = []
        asking = [
            threading.Thread(target=lambda f=follower, ok=ok: found.append(f.agree(ok)))
            for follower, ok in zip(followers, answers[1:], strict=True)
        ]
        for thread in asking:
            thread.start()
        found.append(leader.agree(answers[0]))
        for thread in asking:
            thread.join()
        return found

    for follower in followers:
        assert follower.next() == MEETING
    assert ask(True, True, True) == [True] * 3
    assert ask(True, True, False) == ask(False, True, True) == [False] * 3
    assert ask(True, True, True) == [True] * 3
    followers[0].line.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankLost, match="rank 1 of 3"):
        leader.agree(True)
    leader.close()


def test_ranks_that_wait_for_one_another_are_found(monkeypatch):
    """Each lives and says so; what they wait for can't come."""
    monkeypatch.setattr(link, "TOGETHER_S", 0.5)
    leader, followers, lost, _ = meet(2)
    assert followers[0].next() == MEETING
    threading.Thread(target=followers[0].next, daemon=True).start()
    until(lambda: leader._peers[1].state is not None and leader._peers[1].state.waits_s > 0.5)
    assert lost == []  # rank 0 is idle, and waits for nobody
    with pytest.raises(RankLost, match="2 ranks are stuck"):
        leader.await_loaded()
    until(lambda: lost)
    leader.close()


def test_a_rank_that_does_not_come_is_named():
    leader = Leader(3, on_lost=lambda reason: None)
    with pytest.raises(RankLost, match=r"rank 1 of 3 has not come within 0\.1 s"):
        leader.await_all(MEETING, wait_s=0.1)
    leader.close()
