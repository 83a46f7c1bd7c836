"""`serve-app models` with actions, against a gateway's HTTP application and a Serve that notes what it is told."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from serve_app.catalog.load import BUILT_IN
from serve_app.cli import main
from serve_app.cli import models as command
from tests.cli.conftest import connected
from tests.gateway.test_operate import MINE, RECORD, Serve
from tests.tasks.conftest import record, serve  # noqa: F401

CHAT, NEXT = "@cf/pico/pico-instruct", "@cf/me/next"


@pytest.fixture
async def operated(serve, monkeypatch):  # noqa: F811
    """A gateway, and what Serve is told by it."""
    async with serve() as served:
        connected(served, monkeypatch)
        monkeypatch.setattr(command, "LOOK_S", 0.01)
        deployer = Serve()
        await served.gateway.by_hand.start()
        served.gateway.by_hand.deployer = deployer
        yield served, deployer
        served.gateway.by_hand.close()


@pytest.fixture
def shell(shell):
    return partial(shell, "models")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "mine.yaml"
    made.write_text(RECORD)
    return made


async def test_a_model_from_its_record_to_its_removal(operated, shell, file):
    _, told = operated
    assert (await shell("add", str(file), "--check"))[0] == f"{MINE} is a good record\n"
    assert MINE not in (await shell("list"))[0]
    assert (await shell("add", str(file)))[0] == f"{MINE} is added\n"
    [line] = [line for line in (await shell("list"))[0].splitlines() if MINE in line]
    assert line.split() == [MINE, "stopped", "added"] and not told.told
    assert "waiting" in (await shell("start", MINE))[0]
    assert told.told == [("deploy", MINE, {"reranker": (1, 1)}, False)]
    assert "reranker 1-3" in (await shell("scale", MINE, "--max", "3"))[0]
    shown = json.loads((await shell("scale", MINE, "--stage", "reranker", "--replicas", "2", "--json"))[0])
    assert shown["stages"] == {"reranker": {"min_replicas": 2, "max_replicas": 2}}
    assert [call[2:] for call in told.told[1:]] == [({"reranker": (1, 3)}, True), ({"reranker": (2, 2)}, True)]
    assert (await shell("stop", MINE))[0] == f"{MINE} is stopped\n" and told.told[-1] == ("end", MINE)
    assert (await shell("remove", MINE))[0] == f"{MINE} is removed\n"
    assert MINE not in (await shell("list"))[0]


async def test_one_waits_until_it_answers_and_is_told_how_far_it_is(operated, shell, file):
    served, told = operated
    by_hand, models = served.gateway.by_hand, served.gateway.models
    looks = []
    listed = by_hand.listed

    def watched():
        # Serve's own progress, a step with each look.
        if (model := models.started.get(MINE)) is not None and told.told:
            looks.append(model)
            model.detail = {"state": "deploying"}
            model.ready = len(looks) > 3
        return listed()

    by_hand.listed = watched
    out, err = await shell("add", str(file), "--start", "--wait")
    assert out.splitlines()[0] == f"{MINE} is added" and "ready" in out.splitlines()[1]
    assert f"{MINE}: deploying\n" in err

    def failing():
        model = models.started[MINE]
        model.ready, model.detail = False, {"state": "deploy_failed", "message": "no room for it"}
        return listed()

    by_hand.listed = failing
    assert "no room for it" in (await shell("start", MINE, "--wait", status=1))[1]
    assert "no room for it" in (await shell("list"))[0]


async def test_what_is_refused_says_why(operated, shell, file):
    _, told = operated
    file.write_text(RECORD + "colour: red\n")
    assert "colour: unknown key" in (await shell("add", str(file), status=1))[1]
    assert "No such file" in (await shell("add", str(file.parent / "none"), status=1))[1]
    assert "no model @cf/no/such" in (await shell("start", "@cf/no/such", status=1))[1]
    assert "Give replicas" in (await shell("scale", CHAT, status=1))[1]
    assert "scales to zero is for its record" in (await shell("scale", CHAT, "--min", "0", status=1))[1]
    assert "files are removed by hand" in (await shell("remove", CHAT, status=1))[1]
    assert not told.told


def test_without_an_action_the_catalogue_is_listed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    assert main(["models", "--profile", "local", "--ids"]) == 0
    assert CHAT in capsys.readouterr().out.splitlines()


async def test_a_share_goes_to_another_version_and_comes_back(operated, shell, tmp_path):
    assert (await shell("canary", CHAT))[0] == f"{CHAT} has no canary\n"
    written = (BUILT_IN / "pico-instruct.yaml").read_text().replace(CHAT, NEXT, 1)
    (tmp_path / "next.yaml").write_text(written)
    await shell("add", str(tmp_path / "next.yaml"))
    assert "give --to MODEL and --percent N" in (await shell("canary", CHAT, "--percent", "5", status=1))[1]
    assert "Give --percent" in (await shell("canary", CHAT, "--to", NEXT, status=1))[1]
    out, _ = await shell("canary", CHAT, "--to", NEXT, "--percent", "5")
    first, old, new, age = out.splitlines()
    assert first == f"5 % of {CHAT} go to {NEXT}, which is not ready: it gets none"
    assert old.split() == [CHAT, "0", "requests"] and new.split() == [NEXT, "0", "requests"]
    assert "less than a minute old" in age
    shown = json.loads((await shell("canary", CHAT, "--percent", "50", "--json"))[0])
    assert shown["canary"] == {"model": NEXT, "percent": 50.0, "ready": False}
    assert f"50 % of its requests go to {NEXT}" in (await shell("list"))[0]
    assert "out of range" in (await shell("canary", CHAT, "--percent", "101", status=1))[1]
    assert "no model @cf/no/such" in (await shell("canary", "@cf/no/such", status=1))[1]
    assert (await shell("canary", CHAT, "--end"))[0] == f"{CHAT} has no canary\n"
