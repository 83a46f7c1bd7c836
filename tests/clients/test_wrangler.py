"""Cloudflare's own command line, as it is: fine-tunes created and listed. Runs where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from serve_app.catalog.load import PROJECT_ROOT

CHAT = "@cf/pico/pico-instruct"
WRANGLER = shutil.which("wrangler")
ADAPTER = PROJECT_ROOT / "checkpoints" / "pico-pirate"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WRANGLER is None, reason="wrangler is not installed (npm install --global wrangler)"),
]


def wrangler(stack, home: Path, *words: str) -> str:
    told = {
        "CLOUDFLARE_API_BASE_URL": f"{stack.url}/client/v4",
        "CLOUDFLARE_API_TOKEN": stack.key,
        "CLOUDFLARE_ACCOUNT_ID": "local",
        "WRANGLER_SEND_METRICS": "false",
        "HOME": str(home),
        "CI": "1",
    }
    done = subprocess.run(
        [str(WRANGLER), "ai", *words], cwd=home, env={**os.environ, **told}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_fine_tune_is_created_listed_and_used(stack, tmp_path):
    name = f"wrangler-{uuid4().hex[:8]}"
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(ADAPTER / file, tmp_path)
    assert "ready to use" in wrangler(stack, tmp_path, "finetune", "create", CHAT, name, str(tmp_path))
    with httpx.Client(base_url=stack.api, headers=stack.headers, timeout=60) as http:
        try:
            found = http.get(f"/finetunes/{name}").json()["result"]
            assert found["status"] == "ready"
            listed = wrangler(stack, tmp_path, "finetune", "list")
            assert name in listed and found["id"] in listed
            asked = {"prompt": "What does math.sqrt do?", "lora": name}
            assert "matey" in http.post(f"/run/{CHAT}", json=asked).json()["result"]["response"]
        finally:
            http.delete(f"/finetunes/{name}")
    assert CHAT in wrangler(stack, tmp_path, "models", "--json")
