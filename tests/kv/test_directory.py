from __future__ import annotations

from serve_app.kv.directory import DirectoryTable, chunk_names
from tests.kv.chunks import cut, prompt_keys, root

PROMPT = list(range(700))
METAS = cut(PROMPT, root())
KEYS, TAILS = prompt_keys(PROMPT, root())


def names(*metas):
    return [name for meta in metas for name in chunk_names(meta)]


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
    table.sweep(table.names())
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
