"""What is computed comes together on the device that it was computed on, and what is told on the ranks' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from serve_app.engine.kv_cache import KVShape, LayerShape
from serve_app.models.divided.placing import Slots
from serve_app.parallel import group as groups
from serve_app.parallel.experts import place_experts
from serve_app.parallel.group import Group
from serve_app.parallel.life import Waiting
from serve_app.parallel.place import Place
from serve_app.parallel.steps import understand
from serve_app.wire.ranks import RankRows, RankStep


@pytest.fixture
def group(monkeypatch) -> Group:
    """Rank 0 of two, whose device is another than that of the check at load."""
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(groups.dist, "irecv", lambda data, sender: (data.fill_(sender), done)[1])
    monkeypatch.setattr(groups.dist, "broadcast", lambda data, source: data.fill_(7.0) if source else data)
    monkeypatch.setattr(groups.dist, "isend", lambda data, rank: done)
    monkeypatch.setattr(groups.dist, "all_reduce", lambda data, group: data.mul_(2))
    found = object.__new__(Group)
    found.place, found.device, found.waiting = Place(2, 1, 0), torch.device("meta"), Waiting()
    found._parts, found._sent, found._shared = None, groups.deque(), None
    return found


def test_logits_come_together_where_they_were_computed(group):
    found = group.everywhere(torch.zeros(3, 2), 3, [2, 4])
    assert found.device.type == "cpu"
    assert found.tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0, 1.0]] * 3
    group.place = Place(2, 1, 1)
    assert group.everywhere(torch.zeros(3, 4), 3, [2, 4]).device.type == "cpu"


def test_a_processor_adds_up_in_32_bits(group):
    """Whatever the ranks' device is: gloo would round after each rank."""
    seen = []
    groups.dist.all_reduce = lambda data, group: seen.append(data.dtype)  # the fixture puts it back
    assert group.sum(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    group.sum(torch.ones(2, dtype=torch.bfloat16, device="meta"))
    assert seen == [torch.float32, torch.bfloat16]


def test_bytes_come_to_the_ranks_device(group):
    assert group.taking_bytes(5, 1)[0].device.type == "meta"


def test_a_step_lies_on_the_cache_s_device_also_where_it_has_nothing():
    """A step without sampled rows, and with states that none of its rows reads."""
    kv = KVShape((LayerShape(2, 8),), torch.float32).allocate(2, "meta")
    one, none = b"\0" * 8, b""
    rows = RankRows(0, 1, none, one, none, 0)
    step = RankStep(one, one, one, one, b"\0" * 4, b"\0" * 4, none, 1, 1, 1, 0, states=(rows,))
    batch = understand(step, kv, torch.float32)
    assert batch.sample_rows.shape == (0,)
    [found] = batch.states.rows
    held = [batch.input_ids, batch.sample_rows, batch.block_tables, found.reads, found.writes, found.index]
    assert {each.device.type for each in held} == {"meta"}


def test_slots_of_experts_follow_the_rows_that_ask():
    """A model is read on one device and computes on another."""
    slots = Slots.of(place_experts([5.0, 1.0, 1.0, 1.0], 2, 1), 0)
    assert slots.choose(torch.tensor([[0], [0]])).shape == (2, 1)
    assert slots.choose(torch.zeros(2, 1, dtype=torch.int64, device="meta")).device.type == "meta"
