"""JavaScript clients as they come from their registry, pointed here by their base URL alone.

`make test-node` fetches them; without node or without them this is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ACCOUNT
from tests.e2e.conftest import CHAT, EMBED, RERANK

HERE = Path(__file__).parent / "node"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.skipif(not (HERE / "node_modules").is_dir(), reason="make test-node fetches the clients")
@pytest.mark.parametrize("script", ["openai", "cloudflare", "anthropic", "ai", "langchain"])
def test_unmodified_clients(stack, script):
    environment = {
        **os.environ,
        "SERVER_URL": stack.url,
        "SERVER_KEY": stack.key,
        "SERVER_ACCOUNT": ACCOUNT,
        "CHAT_MODEL": CHAT,
        "EMBED_MODEL": EMBED,
        "RERANK_MODEL": RERANK,
    }
    done = subprocess.run(
        [str(NODE), f"{script}.mjs"], cwd=HERE, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-4000:]
