"""Adapters that come with a model's record lie in the store once, by however many gateways, anew if changed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.gateway.shipped import OWNER, put
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, AdapterTaken, blob
from serve_app.state.blobs.files import open_files
from serve_app.state.store.sql import SqlStore
from tests.adapters import made

MODEL = "@cf/pico/pico-instruct"


@pytest.fixture
def store(tmp_path):
    with SqlStore(tmp_path / "home") as store:
        store.open()
        yield store


@pytest.fixture
def files(tmp_path):
    return open_files(str(tmp_path / "files"))


def folder(where: Path, rank: int) -> Path:
    where.mkdir(exist_ok=True)
    (where / CONFIG).write_bytes(made.config(r=rank, target_modules=["q_proj"]))
    (where / WEIGHTS).write_bytes(made.weights({"model.layers.0.self_attn.q_proj": (8, 8)}, rank=rank))
    return where


def test_several_gateways_ship_one_adapter_which_everybody_finds_by_name(store, files, tmp_path):
    made_at = folder(tmp_path / "a", 4)
    with ThreadPoolExecutor(4) as gateways:
        list(gateways.map(lambda _: put(store.adapters, files, MODEL, "pirate", made_at, 100.0), range(4)))
    [found] = store.adapters.public(10)
    assert (found.account, found.name, found.version, found.rank) == (OWNER, "pirate", 1, 4)
    assert store.adapters.find("anybody", "pirate") == found and store.adapters.own("anybody") == []
    assert json.loads(files.get(blob(found.digest, CONFIG)))["r"] == 4
    assert files.get(blob(found.digest, WEIGHTS)) == (made_at / WEIGHTS).read_bytes()


def test_what_has_changed_is_a_new_version(store, files, tmp_path):
    for rank, now in ((4, 1.0), (4, 2.0), (2, 3.0), (2, 4.0)):
        put(store.adapters, files, MODEL, "pirate", folder(tmp_path / "a", rank), now)
    [found] = store.adapters.public(10)
    assert (found.version, found.rank, found.created, found.modified) == (2, 2, 1.0, 3.0)


def test_two_models_cannot_bring_one_name(store, files, tmp_path):
    put(store.adapters, files, MODEL, "pirate", folder(tmp_path / "a", 4), 1.0)
    with pytest.raises(AdapterTaken, match="rename"):
        put(store.adapters, files, "@cf/other/model", "pirate", folder(tmp_path / "a", 4), 1.0)
