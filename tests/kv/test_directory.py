from __future__ import annotations

from hashlib import sha256
from random import Random

from serve_app.kv.directory import HEARTBEAT_S, INTERVAL_S, MESSAGES_S, KVDirectory, pause_s
from serve_app.kv.directory_table import PARTS, DirectoryTable, chunk_names
from tests.kv.chunks import cut, prompt_keys, root

PROMPT = list(range(700))
METAS = cut(PROMPT, root())
KEYS, TAILS = prompt_keys(PROMPT, root())


def names(*metas):
    return [name for meta in metas for name in chunk_names(meta)]


def sweep(table):
    stale = table.stale()
    for part in range(PARTS):
        table.sweep(part, stale)


def test_best_node_first_and_gaps_count():
    table = DirectoryTable()
    assert table.update("n1", "p1", names(METAS[0]), [])
    table.update("n2", "p2", names(*METAS), [])
    table.update("n3", "p3", names(METAS[0], METAS[2]), [])
    assert table.best(KEYS, TAILS) == [("n2", 22), ("n1", 8), ("n3", 8)]
    assert table.best(KEYS, TAILS, start_block=8, exclude="n2") == []
    assert table.best(KEYS, TAILS, start_block=16, exclude="n2") == [("n3", 22)]


def test_removed_names_are_gone():
    table = DirectoryTable()
    table.update("n1", "p1", names(*METAS), [])
    assert not table.update("n1", "p1", [], names(METAS[1], METAS[2]))
    assert table.best(KEYS, TAILS) == [("n1", 8)]
    table.update("n1", "p1", [], names(METAS[0]))
    assert len(table) == 0


def test_a_restarted_pool_replaces_its_predecessor():
    table = DirectoryTable()
    table.update("n1", "p1", names(*METAS), [])
    assert table.update("n1", "p2", names(METAS[0]), [])
    assert table.best(KEYS, TAILS) == [("n1", 8)]


def test_a_silent_node_is_forgotten_and_swept():
    now = [0.0]
    table = DirectoryTable(clock=lambda: now[0])
    table.update("n1", "p1", names(*METAS), [])
    now[0] = 8.0
    table.update("n2", "p2", names(METAS[0]), [])
    now[0] = 11.0
    assert table.best(KEYS, TAILS) == [("n2", 8)]
    assert table.expire()
    sweep(table)
    assert len(table) == 1 and table.nodes == ["n2"]
    assert table.update("n1", "p1", [], []), "a node that comes back must send everything again"


def test_a_node_of_the_zone_comes_first_unless_it_has_much_less():
    table = DirectoryTable()
    table.update("far", "p1", names(*METAS), [], "us/c")
    table.update("near", "p2", names(METAS[0], METAS[1]), [], "eu/a")
    table.update("next", "p3", names(*METAS), [], "eu/b")
    assert table.best(KEYS, TAILS) == [("far", 22), ("next", 22), ("near", 16)]
    assert table.best(KEYS, TAILS, zone="eu/b") == [("next", 22), ("near", 16), ("far", 22)]
    # 17.6 blocks' worth next door against 16 here.
    assert table.best(KEYS, TAILS, zone="eu/a") == [("next", 22), ("near", 16), ("far", 22)]
    assert table.best(KEYS, TAILS, start_block=8, zone="us/c")[0] == ("far", 22)
    table.update("next", "p3", [], names(METAS[2]))
    assert table.best(KEYS, TAILS, zone="eu/a")[0] == ("near", 16)


def test_sets_of_holders_go_with_what_they_were_for():
    """A chunk that one node after the other takes has had as many sets of holders as nodes."""
    table = DirectoryTable()
    for number in range(50):
        table.update(f"n{number}", "p", names(*METAS), [])
    assert table.sets == 1 and len(table.best(KEYS, TAILS)) == 50
    for number in range(50):
        assert table.sets == 1
        table.update(f"n{number}", "p", [], names(*METAS))
    assert table.sets == len(table) == 0


def test_nodes_that_come_and_go_leave_nothing_behind():
    now = [0.0]
    table = DirectoryTable(clock=lambda: now[0])
    table.update("stays", "p", names(*METAS), [])
    for number in range(40):
        # A node that is gone after a while, and one whose pool is started anew each time.
        table.update(f"n{number}", "p", names(*METAS[number % 3 :]), [], f"z{number}")
        table.update("again", f"p{number}", names(METAS[0]), [])
        now[0] += 6.0
        table.update("stays", "p", [], [])
        assert table.expire() == (number > 0)
        sweep(table)
        assert table.sets <= 6 and len(table._number) <= 5 and len(table._zones) <= 4
    now[0] += 20.0
    table.update("stays", "p", [], [])
    table.expire()
    sweep(table)
    assert table.sets == 1 and not table.stale() and table.nodes == ["stays"] and list(table._zones) == ["stays"]
    assert table.best(KEYS, TAILS) == [("stays", 22)]


def test_any_changes_are_as_name_by_name():
    """Against a table that is a dict of sets and nothing else."""
    draw, now = Random(3), [0.0]
    table, plain = DirectoryTable(clock=lambda: now[0]), {}
    incarnation = {f"n{i}": 0 for i in range(6)}
    keys = [bytes([4 * i]) * 32 for i in range(60)]
    for _ in range(600):
        node = draw.choice(list(incarnation))
        if draw.random() < 0.05:
            incarnation[node] += 1
            plain = {key: held - {node} for key, held in plain.items()}
        added, removed = (draw.sample(keys, draw.randrange(12)) for _ in range(2))
        table.update(node, f"p{incarnation[node]}", [key[:15] for key in added], [key[:15] for key in removed])
        for key in removed:
            plain[key] = plain.get(key, set()) - {node}
        for key in added:
            plain[key] = plain.get(key, set()) | {node}
        if draw.random() < 0.1:
            table.expire()
            sweep(table)
            assert len(table) == sum(map(bool, plain.values()))
            assert table.sets == len({frozenset(held) for held in plain.values() if held})
        key = draw.choice(keys)
        assert {found for found, _ in table.best([key])} == plain.get(key, set())


class Watched(list):
    """Knows how often and how far it was looked into."""

    def __init__(self, keys):
        super().__init__(keys)
        self.asked = []

    def __getitem__(self, at):
        self.asked.append(at)
        return super().__getitem__(at)


def test_a_prompt_is_looked_for_chunk_by_chunk_and_no_further_than_anybody_has_it():
    table = DirectoryTable()
    long = [sha256(b"%d" % i).digest() for i in range(400)]
    table.update("n1", "p1", [key[:15] for key in long[7:300:8]], [])
    assert table.best(known := Watched(long)) == [("n1", 296)]
    assert len(known.asked) < 60 and max(known.asked) < 304
    unknown = [bytes([i]) * 32 for i in range(200)]
    assert table.best(new := Watched(unknown)) == [] and max(new.asked) == 7
    assert table.best(unknown[:8] + long[8:], start_block=8) == [("n1", 296)]


def plainly(held, keys, tails, start):
    """Block by block, node by node. ``held``: names by node."""
    found = []
    for node, names_of in held.items():
        end = start
        for at, key in enumerate(keys[start:], start):
            if key[:15] in names_of and end >= at // 8 * 8:
                end = at + 1
        if end >= len(keys) // 8 * 8 and any(key[:15] in names_of for key in tails):
            end = len(keys) + 1
        if end > start:
            found.append((node, end))
    return set(found)


def test_whatever_parts_of_a_prompt_nodes_have_is_found():
    """Chunks as they are cut, none beyond a multiple of eight blocks, of which some have gone."""
    draw = Random(5)
    for _ in range(300):
        keys = [draw.randbytes(32) for _ in range(draw.randrange(1, 40))]
        tails = [draw.randbytes(32) for _ in range(2)]
        table, held = DirectoryTable(), {}
        for node in ("n1", "n2", "n3"):
            ends = {end for end in range(8, len(keys) + 1, 8) if draw.random() < 0.8}
            ends |= {draw.randrange(1, len(keys) + 1) for _ in range(draw.randrange(3))}
            held[node] = {keys[end - 1][:15] for end in ends} | {tails[0][:15] for _ in range(draw.randrange(2))}
            table.update(node, "p", held[node], [])
        start = draw.randrange(len(keys))
        assert set(table.best(keys, tails, start)) == plainly(held, keys, tails, start)


def test_messages_of_others_remove_what_a_lost_node_leaves():
    now = [0.0]
    actor = KVDirectory(clock=lambda: now[0])
    incarnation, unknown, _ = actor.update("n1", "p1", names(*METAS), [])
    actor.update("n2", "p2", names(METAS[0]), [])
    assert unknown and actor.update("n2", "p2", [], [])[:2] == (incarnation, False)
    assert actor.stats() == {"names": 4, "nodes": ["n1", "n2"], "sets": 2}
    for _ in range(6):
        now[0] += 2.0
        actor.update("n2", "p2", [], [])
    assert actor.stats() == {"names": 1, "nodes": ["n2"], "sets": 1}
    assert actor.best(KEYS, TAILS) == [("n2", 8)]


def test_a_message_removes_only_a_part_of_much():
    ticks = iter(range(10**6))
    actor = KVDirectory(clock=lambda: next(ticks) * 0.5)
    keys = [bytes([at, n]) * 8 for at in range(PARTS) for n in range(3)]
    actor.update("n1", "p1", keys, [])
    left = []
    while not left or left[-1]:
        actor.update("n2", "p2", [], [])
        left.append(actor.stats()["names"])
    # One part a message: the clock of this test is slow.
    assert left.count(len(keys)) < 20 and left[-PARTS:] == list(range(len(keys) - 3, -1, -3))


def test_many_pools_send_as_many_messages_as_few():
    assert pause_s(2) == pause_s(25) == INTERVAL_S and pause_s(125) == 125 / MESSAGES_S == 0.5
    assert pause_s(10_000) == HEARTBEAT_S


def test_names_of_messages_are_longer_than_those_that_are_kept() -> None:
    """As pools of the release before send them, and as its directory looks them up."""
    table = DirectoryTable()
    key = bytes(range(32))
    table.update("a", "pool", [key[:16]], [])
    assert table.best([*[bytes(32)] * 7, key]) == [("a", 8)]
    table.update("a", "pool", [], [key[:16]])
    assert len(table) == 0
