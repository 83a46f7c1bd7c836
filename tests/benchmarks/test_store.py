"""The store's benchmark with two gateways for a second, and with an entry that the ledger does not have."""

from __future__ import annotations

import json

import pytest

from benchmarks.gateway import store
from tests.variants import some

FEW = ["--gateways", "2", "--rate", "40", "--seconds", "1", "--json"]


@pytest.mark.parametrize("where", some([[], ["--postgresql"]], []))
def test_figures_come_from_a_whole_ledger_only(capsys, where):
    assert store.main([*FEW, *where]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["requests"] + found["refused"] == 40 and found["transactions_per_s"] > 0
    assert found["store"] == ("postgresql" if where else "sqlite") and found["stored_p50_ms"] > 0


def test_an_entry_that_is_lost(monkeypatch, capsys):
    async def fewer(load):
        return 1

    monkeypatch.setattr(store, "_entries", fewer)
    monkeypatch.setattr(store, "gateway", _ended)
    with pytest.raises(SystemExit, match="no figures(?s:.)*entries: '1' instead of '4'"):
        store.main(FEW)
    assert not capsys.readouterr().out


def _ended(load, number):
    return store.Told(entries=2, waits=[0.1] * load.count)
