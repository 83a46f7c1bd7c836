"""Pictures before a request waits for anything: measured in another process, remembered, refused with the reason."""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.pictures import picture_part
from serve_app.api.types import GenerateRequest
from serve_app.gateway.backends import engine, media
from serve_app.gateway.backends.media import MAX_FILES
from serve_app.tasks.model import ServedModel
from tests import sight
from tests.gateway.backends.conftest import question, served
from tests.media.files import bad_pictures

SALT, OTHER = b"one account's", b"another's"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = sight.write(tmp_path_factory.mktemp("model") / "llava", "llava")
    return served(path, vision=True)


def asks(*files: bytes) -> GenerateRequest:
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    parts = [picture_part({"type": "image_url", "image_url": {"url": url}}, "x") for url in urls]
    return question(parts)


async def test_pictures_count_as_tokens_of_the_prompt(backend, model):
    assert "image" in model.limits.takes
    one, two = sight.picture(40, 30), sight.picture(64, 10, seed=1)
    plain = await backend.prepare(model, asks(), SALT)
    prepared = await backend.prepare(model, asks(one, two, one), SALT)
    assert (
        prepared.prompt_tokens
        == plain.prompt_tokens + 3 * 16
        == await backend.count_tokens(model, asks(one, two, one), SALT)
    )
    first, _, third = prepared.prompt.media
    assert (first.file.width, first.file.height) == (40, 30) and first.file.digest == third.file.digest
    assert [placed.places[0][1] for placed in prepared.prompt.media] == [16] * 3


async def test_bad_files_are_refused_at_once(backend, model):
    await backend.prepare(model, asks(sight.picture(8, 8)), SALT)  # the process is up
    slowest = 0.0
    for name, file in bad_pictures().items():
        began = time.process_time()
        with pytest.raises(InvalidInput, match=r"messages\[0\]\.content"):
            await backend.prepare(model, asks(file), SALT)
        slowest = max(slowest, time.process_time() - began)
        assert name
    # The time of this process: the other one may be slowed down by anybody.
    assert slowest < 1.0
    with pytest.raises(InvalidInput, match="must be base64"):
        request = asks(b"x")
        request.messages[0]["content"][0]["source"]["data"] = "!"
        await backend.prepare(model, request, SALT)


async def test_what_one_account_has_sent_is_unknown_to_another(backend, model, monkeypatch):
    """Or it could be told by the clock."""
    looked = []
    request = asks(sight.picture(31, 17))
    await backend.prepare(model, request, SALT)
    decoder = backend._looker._decoder
    size = decoder.size
    monkeypatch.setattr(decoder, "size", lambda data: looked.append(data) or size(data))
    await backend.prepare(model, request, SALT)
    assert not looked
    await backend.prepare(model, request, OTHER)
    assert len(looked) == 1


async def test_what_is_asked_for_again_is_remembered(backend, model, monkeypatch):
    monkeypatch.setattr(media, "REMEMBERED", 2)
    for width in (11, 12, 11, 13):
        await backend.prepare(model, asks(sight.picture(width, 10)), SALT)
    assert [size for size in backend._looker._known.values()] == [(11, 10), (13, 10)]


async def test_there_is_a_most_of_pictures(backend, model):
    with pytest.raises(InvalidInput, match=f"at most {MAX_FILES} are taken"):
        await backend.prepare(model, asks(*[sight.picture(8, 8)] * (MAX_FILES + 1)), SALT)


async def test_a_family_that_is_not_known_is_named(backend, model, tmp_path):
    path = sight.write(tmp_path / "other", "llava")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "internvl"}))
    record = model.record.model_copy(update={"weights": model.record.weights.model_copy(update={"path": str(path)})})
    other = ServedModel(record, model.profile, path, Path("/nonexistent"))
    with pytest.raises(InvalidInput, match="takes no pictures: the way of internvl"):
        await backend.prepare(other, asks(sight.picture(8, 8)), SALT)
    assert (await backend.prepare(other, asks(), SALT)).prompt_tokens > 0


async def test_placeholders_of_pictures_are_not_tokenised_on_the_loop(backend, model, monkeypatch):
    read, on_loop = engine.read_prompt, []

    def seen(*args: Any, **more: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return read(*args, **more)

    monkeypatch.setattr(engine, "read_prompt", seen)
    await backend.prepare(model, asks(sight.picture(8, 8)), SALT)
    assert on_loop == [False]
