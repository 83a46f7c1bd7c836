"""How a start is told of."""

from __future__ import annotations

import re
import time

import pytest

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import load_catalog
from serve_app.catalog.operated import Operated
from serve_app.config import load_settings
from serve_app.serving import Progress


def test_a_start_that_takes_long_is_said_to_go_on(capsys):
    say = Progress(quiet_s=0.05)
    said = ""
    for part in ("Ray", "Serve"):
        with say:
            say(f"{part} begins")
            said = ""
            until = time.monotonic() + 60
            while "still starting" not in said and time.monotonic() < until:
                time.sleep(0.01)
                said += capsys.readouterr().out
        assert re.search(
            rf"s  {part} begins\n +\d+\.\d s  still starting; the machine's load is \d+ on \d+ cores\n", said
        )
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_models_without_room_are_left_out_unless_they_were_asked_for(tmp_path, monkeypatch):
    import ray

    from serve_app.cluster import LocalCluster

    large, small = "@cf/openai/gpt-oss-120b", "@cf/qwen/qwen3-0.6b"
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    said: list[str] = []
    cluster = LocalCluster(load_settings({"SERVE_APP_PROFILE": "gpu"}, home=tmp_path), said.append)
    cluster._check_room()
    assert any(large in line and "takes 2 GPUs" in line and "there are 1" in line for line in said)
    assert large not in cluster._settings.models and small in cluster._settings.models
    named = LocalCluster(load_settings({"SERVE_APP_PROFILE": "gpu", "SERVE_APP_MODELS": large}, home=tmp_path))
    with pytest.raises(CatalogError, match="takes 2 GPUs"):
        named._check_room()
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 8.0}}])
    roomy = LocalCluster(load_settings({"SERVE_APP_PROFILE": "gpu"}, home=tmp_path), said.append)
    roomy._check_room()
    assert roomy._settings.models == ()
    # Nothing would be left.
    only = load_catalog(tmp_path)
    only.entries = {large: only.entries[large]}
    alone = LocalCluster(load_settings({"SERVE_APP_PROFILE": "gpu"}, home=tmp_path), catalog=only)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 1.0}}])
    with pytest.raises(CatalogError, match="takes 2 GPUs"):
        alone._check_room()
    # One that was started by hand is left out as well, and it is said why.
    catalog = load_catalog(tmp_path, operated={large: Operated(large, running=True)})
    by_hand = LocalCluster(load_settings({"SERVE_APP_PROFILE": "gpu"}, home=tmp_path), catalog=catalog)
    by_hand._check_room()
    assert large not in [record.id for record, _ in catalog.started("gpu", by_hand._settings.models)]
    assert "takes 2 GPUs" in catalog.problems[large]
