"""JavaScript clients as they come from their registry, pointed here by their base URL alone.

`make test-node` fetches them; without node or without them this is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT, EMBED, RERANK
from training.looking import draw

HERE = Path(__file__).parent / "node"
NODE = shutil.which("node")
MEDIA = {"VISION": "vision", "SPEAKING": "speaker", "HEARING": "hearing"}


pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(not (HERE / "node_modules").is_dir(), reason="make test-node fetches the clients"),
]


@pytest.mark.parametrize("script", ["openai", "cloudflare", "anthropic", "ai", "langchain"])
def test_unmodified_clients(stack, script):
    run(stack, script, CHAT_MODEL=CHAT, EMBED_MODEL=EMBED, RERANK_MODEL=RERANK)


@pytest.mark.slow  # three models start
def test_pictures_and_sounds(stack, tmp_path):
    picture, [thing] = draw(Random("one red circle"), 1)
    picture.save(tmp_path / "picture.png")
    models = {f"{what}_MODEL": f"@cf/pico/pico-{name}" for what, name in MEDIA.items()}
    run(stack, "media", PICTURE=str(tmp_path / "picture.png"), SHOWN=f"{thing.colour} {thing.kind}", **models)


def run(stack, script: str, **environment: str) -> None:
    """Runs a script to its end. ``environment``: what it reads beside the server's address and key."""
    environment |= {**os.environ, "SERVER_URL": stack.url, "SERVER_KEY": stack.key, "SERVER_ACCOUNT": ACCOUNT}
    done = subprocess.run(
        [str(NODE), f"{script}.mjs"], cwd=HERE, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-4000:]
