"""Code of every model's page, run as it is pasted: each language and each client, for each model that is served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from random import Random

import pytest

from tests.clients.test_node import HERE, NODE
from tests.e2e.conftest import CHAT, EMBED, RERANK
from tests.media.files import sound
from training import looking
from training.scenes import draw

VISION = "@cf/pico/pico-vision"
# What stands in what each prints; of chats the answer, of vectors their length.
SAID = {
    CHAT: "square root",
    EMBED: "384",
    RERANK: "score",
    "@cf/pico/pico-sentiment": "POSITIVE",
    "@cf/pico/pico-shapes": "label",
    "@cf/pico/pico-detector": "box",
    "@cf/pico/pico-summary": "summary",
    "@cf/pico/pico-translator": "translated_text",
    "@cf/pico/pico-hearing": "",
    "@cf/pico/pico-speaker": "",
    VISION: "picture",
    "@cf/pico/pico-describer": "description",
}
OTHERWISE = {"Decisions": '"noul"'}
PATIENCE_S = 120


@pytest.mark.slow  # some fifty programs
@pytest.mark.parametrize("model", SAID)
def test_code_runs_as_it_is_pasted(tab, stack, tmp_path, model):
    tab.open(f"#/models/{model}?tab=code")
    found = code_of(tab.page)
    assert {language for language, _ in found} == {"curl", "Python", "JavaScript"}
    picture, _ = draw(Random("detect 4"), 3)
    otherwise = dict(OTHERWISE)
    if model == VISION:
        picture, [thing] = looking.draw(Random("one red circle"), 1)
        otherwise["With a picture"] = f"{thing.colour} {thing.kind}"
    sent = BytesIO()
    picture.save(sent, "PNG")
    (tmp_path / "picture.png").write_bytes(sent.getvalue())
    (tmp_path / "sound.wav").write_bytes(sound(2.0))
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    failed = {}
    for (language, client), code in found.items():
        if language == "JavaScript" and not runs_here(client):
            continue
        done = run(language, code, tmp_path, {"KEY": stack.key, "SERVE_APP_HOME": str(stack.home)})
        wanted = otherwise.get(client, SAID[model])
        if done.returncode or wanted not in done.stdout:
            failed[language, client] = (done.stdout + done.stderr)[-600:]
    assert failed == {}


def test_every_model_that_is_served_is_among_them(http):
    served = {one["name"] for one in http.get("/models/search?per_page=1000").json()["result"]}
    assert {name for name in served if name.startswith(("@cf/pico/", "@cf/sentence-transformers/"))} <= set(SAID)


def code_of(page) -> dict[tuple[str, str], str]:
    """By language and client, as a person finds it."""
    found = {}
    for language in ("curl", "Python", "JavaScript"):
        page.get_by_role("tab", name=language, exact=True).click()
        clients = page.get_by_role("group", name="Client", exact=True).get_by_role("button")
        for name in clients.all_inner_texts() or [""]:
            if name:
                clients.get_by_text(name, exact=True).click()
            found[language, name] = page.get_by_role("region", name="Code", exact=True).inner_text()
    return found


def runs_here(client: str) -> bool:
    """Whether there is a node, and the packages of the client."""
    return NODE is not None and (client == "fetch" or (HERE / "node_modules").is_dir())


def run(language: str, code: str, folder: Path, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    if language == "curl":
        program = [str(shutil.which("bash")), "-ec", code]
    elif language == "Python":
        program = [sys.executable, "-c", code]
    else:
        (folder / "sample.mjs").write_text(code)
        program = [str(NODE), "sample.mjs"]
    # What the tests set for Ray's processes is not in the shell of who pastes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | more
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
