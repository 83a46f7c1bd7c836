"""`serve-app lora` against a gateway's HTTP application."""

from __future__ import annotations

import json
from functools import partial

import pytest

from serve_app.cli import main
from tests.cli.conftest import connected
from tests.tasks.adapters.conftest import tuned  # noqa: F401
from tests.tasks.adapters.tuned import GOOD_CONFIG, GOOD_WEIGHTS, other_weights
from tests.tasks.conftest import KEY, record, serve  # noqa: F401


@pytest.fixture
async def shell(tuned, shell, monkeypatch):  # noqa: F811
    connected(tuned, monkeypatch)
    return partial(shell, "lora")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine"
    made.mkdir()
    (made / "adapter_config.json").write_bytes(GOOD_CONFIG)
    (made / "adapter_model.safetensors").write_bytes(GOOD_WEIGHTS)
    return made


async def test_an_adapter_from_upload_to_deletion(tuned, shell, folder, tmp_path):  # noqa: F811
    said, _ = await shell("upload", str(folder), "--model", tuned.model, "--description", "of a test")
    assert said == f"mine  version 1 of rank 4 for {tuned.model} is ready\n"
    listed, _ = await shell("list")
    assert listed.startswith("mine") and "ready" in listed and "v1, rank 4" in listed
    shown = json.loads((await shell("show", "mine", "--json"))[0])
    assert shown["description"] == "of a test" and not shown["public"]
    (folder / "adapter_model.safetensors").write_bytes(other_weights())
    again = json.loads((await shell("upload", str(folder), "--json"))[0])
    assert again["id"] == shown["id"] and again["version"] == 2
    await shell("download", "mine", "-o", str(tmp_path / "back"))
    assert (tmp_path / "back" / "adapter_model.safetensors").read_bytes() == other_weights()
    assert (tmp_path / "back" / "adapter_config.json").read_bytes() == GOOD_CONFIG
    assert (await shell("list", "--public"))[0] == ""
    await shell("delete", "mine")
    assert (await shell("list"))[0] == ""


async def test_what_is_refused_says_what_to_do(tuned, shell, folder, tmp_path):  # noqa: F811
    assert "save_pretrained" in (await shell("upload", str(tmp_path), "--model", tuned.model, status=1))[1]
    assert "--model" in (await shell("upload", str(folder), status=1))[1]
    assert "not found" in (await shell("show", "nobody", status=1))[1]
    (folder / "adapter_model.safetensors").write_bytes(GOOD_WEIGHTS[:-1])
    assert "is cut off" in (await shell("create", str(folder), "--model", tuned.model, status=1))[1]
    assert "is cut off" in (await shell("list"))[0]
    assert "/versions" in (await shell("create", str(folder), "--model", tuned.model, status=1))[1]
    # Sent again, it goes on where it was.
    (folder / "adapter_model.safetensors").write_bytes(GOOD_WEIGHTS)
    await shell("upload", str(folder), "--public")
    assert "ready" in (await shell("show", "mine"))[0]


def test_the_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["lora", "--help"])
    assert "serve-app lora upload" in capsys.readouterr().out
