"""Families that no model of the project's has, over HTTP: sounds in conversations, pictures beside the text, and
pictures in a model whose layers keep states.

Each is a random checkpoint with a record in a catalogue's folder, and answers as transformers' ``generate`` does.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray import serve

from deployments.model import model_application
from serve_app.app import gateway_application
from serve_app.catalog.load import load_catalog
from serve_app.config import api_key, load_settings
from serve_app.tasks.model import application_name
from tests import hearing, sight
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
HEARS, SEES, KEEPS = "@cf/test/hears", "@cf/test/sees", "@cf/test/keeps"
TOKENS = 12
QUESTION = "What is it?"


def record(model: str, path: Path) -> dict[str, Any]:
    size = {"min_replicas": 1, "max_replicas": 1, "num_cpus": 0.25, "cpu_threads": 1, "kv_cache_bytes": "4MiB",
            "max_batch_tokens": 64, "max_num_seqs": 8}  # fmt: skip
    return {
        "id": model, "task": "text-generation", "description": "Of a test.", "created_at": "2026-11-24",
        "weights": {"path": str(path)}, "dtype": "float32", "defaults": {"temperature": 0},
        "properties": {"context_window": 512, "hearing" if model == HEARS else "vision": True},
        "serving": {"local": {"decode": size, "prefill": size, "min_remote_prefill_tokens": 16}},
    }  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    weights = tmp_path_factory.mktemp("weights")
    return {
        HEARS: hearing.write(weights / "hears", "qwen2_audio"),
        SEES: sight.write(weights / "sees", "mllama"),
        KEEPS: sight.write(weights / "keeps", "qwen3_5"),
    }


@pytest.fixture(scope="module")
def http(stack, folders, tmp_path_factory):
    home = tmp_path_factory.mktemp("unshipped")
    (home / "models").mkdir()
    for number, (model, path) in enumerate(folders.items()):
        (home / "models" / f"{number}.yaml").write_text(yaml.safe_dump(record(model, path)))
    settings = load_settings({"SERVE_APP_HOME": str(home), "SERVE_APP_MODELS": ",".join(folders)})
    catalog = load_catalog(home)
    targets = [
        serve.RunTarget(
            target=model_application(catalog[model], catalog[model].serving["local"], settings, catalog.source(model)),
            name=application_name(model),
            route_prefix=None,
        )
        for model in folders
    ]
    gateway = serve.RunTarget(
        target=gateway_application(settings, replicas=(1, 1)), name="unshipped", route_prefix="/unshipped"
    )
    serve.run_many([*targets, gateway], wait_for_applications_running=False)
    try:
        headers = {"Authorization": f"Bearer {api_key(settings)}"}
        with httpx.Client(base_url=f"{stack.url}/unshipped", headers=headers, timeout=120) as client:
            wait_for(lambda: all(answers(client, model) for model in folders), 180, 0.5)
            yield client
    finally:
        for name in ("unshipped", *map(application_name, folders)):
            serve.delete(name, _blocking=False)


def answers(client: httpx.Client, model: str) -> bool:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        return client.post("/v1/chat/completions", json=asked).status_code == 200
    except httpx.HTTPError:
        return False


def shown(model: str, file: bytes) -> dict[str, Any]:
    coded = base64.b64encode(file).decode()
    if model == HEARS:
        return {"type": "input_audio", "input_audio": {"data": coded, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}}


@pytest.mark.parametrize("model", [HEARS, SEES, KEEPS])
def test_every_dialect_that_takes_a_file_answers_as_transformers_does(http, folders, model):
    hears = model == HEARS
    truth = (hearing.Truth if hears else sight.Truth)(folders[model])
    first, other = (hearing.sound(0.7, seed) if hears else sight.picture(90, 33, seed) for seed in (1, 2))
    text = {"type": "text", "text": QUESTION}

    def chat(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
        asked = {"model": model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": TOKENS,
                 "ignore_eos": True, "return_token_ids": True, **more}  # fmt: skip
        answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()

    long = {"type": "text", "text": f"{QUESTION} " * 12}
    said = {}
    for files in ([first], [other], [first, other]):
        for words in (text, long):
            told = chat(*(shown(model, file) for file in files), words)
            found = told["choices"][0]["token_ids"]
            assert found == truth(told["prompt_token_ids"], files, TOKENS)
            said[len(files), files[0], words["text"]] = told
    assert len({tuple(told["choices"][0]["token_ids"]) for told in said.values()}) == len(said)
    again = chat(shown(model, first), long)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert again["choices"] == said[1, first, long["text"]]["choices"]

    wanted = said[1, first, QUESTION]["choices"][0]["message"]["content"]
    coded = base64.b64encode(first).decode()
    data = f"data:{'audio/wav' if hears else 'image/png'};base64,{coded}"
    part = shown(model, first) if hears else {"type": "input_image", "image_url": data}
    body = {"model": model, "input": [{"role": "user", "content": [part, {"type": "input_text", "text": QUESTION}]}]}
    responses = http.post("/v1/responses", json={**body, "max_output_tokens": TOKENS, "ignore_eos": True}).json()
    assert responses["output"][-1]["content"][0]["text"] == wanted
    native = f"/client/v4/accounts/local/ai/run/{model}"
    rest = {"max_tokens": TOKENS, "ignore_eos": True}
    for body in (
        {"prompt": QUESTION, "audio" if hears else "image": coded},
        {"messages": [{"role": "user", "content": [shown(model, first), text]}]},
    ):
        assert http.post(native, json={**body, **rest}).json()["result"]["response"] == wanted
    kind = "audio_url" if hears else "image_url"
    peers = chat({"type": kind, kind: {"url": data}}, text)
    assert peers["choices"][0]["message"]["content"] == wanted
    broken = chat_status(http, model, shown(model, b"no such file" * 20))
    assert broken[0] == 400 and "messages[0].content" in broken[1]
    unknown = {"type": "image_url", "image_url": {"url": data}} if hears else shown(HEARS, first)
    assert chat_status(http, model, unknown)[0] == 400


def chat_status(http: httpx.Client, model: str, part: dict[str, Any]) -> tuple[int, str]:
    answer = http.post("/v1/chat/completions", json={"model": model, "messages": [{"role": "user", "content": [part]}]})
    return answer.status_code, answer.json()["error"]["message"]
