"""Drawing by other APIs: OpenAI's client with generations, edits and streams; `serve-app run`; lines of batches."""

from __future__ import annotations

import base64
import json
from io import BytesIO

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from PIL import Image

from tests.cli.conftest import connected, shell  # noqa: F401
from tests.gateway.http.test_batched import job, perform
from tests.tasks.conftest import ACCOUNT, KEY
from tests.tasks.test_drawing import CODED, MODEL, PROMPT, served  # noqa: F401


def client(found, prefix: str = "/v1") -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=found.http._transport)
    return AsyncOpenAI(api_key=KEY, base_url=f"http://here{prefix}", http_client=http, max_retries=0)


@pytest.mark.parametrize("prefix", ["/v1", ACCOUNT + "/v1"])
async def test_generations(served, prefix):  # noqa: F811
    found, worker = served
    images = client(found, prefix).images
    answer = await images.generate(
        model=CODED, prompt=PROMPT, n=3, size="512x768", output_format="webp", output_compression=80, quality="high",
        response_format="b64_json", extra_body={"seed": 5, "steps": 2, "guidance": 1.5, "negative_prompt": "dog"},
    )  # fmt: skip
    pictures = [Image.open(BytesIO(base64.b64decode(one.b64_json))) for one in answer.data]
    assert [one.format for one in pictures] == ["WEBP"] * 3 and pictures[0].size == (512, 768)
    assert (answer.size, answer.output_format) == ("512x768", "webp")
    assert [asked["seeds"] for asked, _ in worker.asked] == [[5, 6, 7]]
    asked = worker.asked[0][0]
    assert (asked["steps"], asked["guidance"], asked["negative_prompt"], asked["quality"]) == (2, 1.5, "dog", 80)
    usage = answer.usage.model_dump()
    assert (usage["total_tokens"], usage["image_tiles"], usage["image_steps"]) == (0, 12, 6)
    assert usage["neurons"] == pytest.approx(12 * 4.8 + 6 * 9.6)
    # The file comes as base64 whatever the model's usual answer is, and whatever is accepted.
    usual = await images.generate(model=MODEL, prompt=PROMPT, extra_headers={"Accept": "image/jpeg"})
    assert Image.open(BytesIO(base64.b64decode(usual.data[0].b64_json))).format == "PNG"
    assert found.endings == [("text-to-image", "done")] * 2


async def test_streams(served):  # noqa: F811
    found, worker = served
    events = await client(found).images.generate(model=CODED, prompt=PROMPT, n=2, stream=True, size="256x256")
    told = [event async for event in events]
    assert [event.type for event in told] == ["image_generation.completed"] * 2
    assert told[0].size == "256x256" and told[0].usage.total_tokens == 0
    assert Image.open(BytesIO(base64.b64decode(told[1].b64_json))).size == (256, 256)
    raw = await found.http.post("/v1/images/generations", json={"model": CODED, "prompt": PROMPT, "stream": True})
    assert raw.text.startswith(": step 0 of 4\n\nevent: image_generation.completed\ndata: ")


async def test_edits(served):  # noqa: F811
    found, worker = served
    images = client(found).images
    answer = await images.edit(model=MODEL, image=b"picture", mask=b"mask", prompt=PROMPT, n=1, extra_body={
        "strength": 0.5, "seed": 9, "num_steps": 3,
    })  # fmt: skip
    assert answer.size is None and answer.data[0].b64_json
    asked, files = worker.asked.pop()
    assert (files, asked["files"], asked["width"]) == (b"picturemask", [7, 4], None)
    assert (asked["strength"], asked["seeds"], asked["steps"]) == (0.5, [9], 3)
    events = await images.edit(model=MODEL, image=b"picture", prompt=PROMPT, size="512x512", stream=True)
    assert [event.type async for event in events] == ["image_edit.completed"]
    assert worker.asked.pop()[0]["width"] == 512
    form = {"model": (None, MODEL), "prompt": (None, PROMPT)}
    for more, words in (
        ({}, "image is missing"), ({"image": ("x", b"1"), "n": (None, "many")}, "n must be an integer"),
        ({"image": ("x", b"1"), "size": (None, "9x9")}, "size: both sides"),
        ({"image": ("x", b"")}, "image is missing"),
    ):  # fmt: skip
        refused = await found.http.post("/v1/images/edits", files={**form, **more})
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
    two = [("image[]", ("a", b"1")), ("image[]", ("b", b"2")), ("model", (None, MODEL)), ("prompt", (None, PROMPT))]
    assert "one picture" in (await found.http.post("/v1/images/edits", files=two)).text


async def test_what_is_refused(served):  # noqa: F811
    found, worker = served
    images = client(found).images
    for more in (
        {"size": "big"}, {"size": "128x128"}, {"size": "4096x512"}, {"n": 11}, {"n": 0}, {"output_format": "gif"},
        {"n": 5, "size": "2048x2048"},
        {"background": "transparent"}, {"response_format": "url"}, {"extra_body": {"steps": 9}}, {"prompt": ""},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            await images.generate(**{"model": CODED, "prompt": PROMPT, **more})
        assert refused.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        await images.generate(model="@cf/no/such", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="leave it out"):
        await images.generate(model=CODED, prompt="refuse this")
    assert len(worker.asked) == 1


async def test_estimates(served):  # noqa: F811
    found, worker = served
    body = {"model": CODED, "prompt": PROMPT, "n": 2, "size": "1024x512"}
    told = await found.http.post("/v1/images/generations", json=body, headers={"x-estimate": "true"})
    assert told.json()["units"]["expected"] == {"image_tiles": 4, "image_steps": 8, "image_tile_steps": 16}
    assert worker.asked == []


async def test_the_command_line(served, shell, tmp_path, monkeypatch):  # noqa: F811
    found, worker = served
    connected(found, monkeypatch)
    out, given, mask = tmp_path / "out.png", tmp_path / "in.png", tmp_path / "mask.png"
    assert await shell("run", MODEL, PROMPT, "--seed", "200", "--out", str(out)) == ("", "")
    assert Image.open(out).getpixel((0, 0)) == (200, 0, 0)
    given.write_bytes(b"picture")
    mask.write_bytes(b"mask")
    await shell("run", MODEL, PROMPT, "--image", str(given), "--mask", str(mask), "--out", str(out))
    assert worker.asked.pop()[1] == b"picturemask"
    assert Image.open(out).size == (300, 200)


async def test_lines_of_batches_are_json(served):  # noqa: F811
    """Whatever a model answers with by itself."""
    found, _ = served
    native, elsewhere = {"prompt": PROMPT}, {"model": MODEL, "prompt": PROMPT}
    jobs = [job(f"{ACCOUNT}/run/{MODEL}", native), job("/v1/images/generations", elsewhere, 1)]
    for done, picture in zip(
        await perform(found, *jobs),
        (lambda told: told["result"]["image"], lambda told: told["data"][0]["b64_json"]),
        strict=True,
    ):
        assert done.status == 200 and done.entries[0].batch == "b" * 32
        assert base64.b64decode(picture(json.loads(done.body))).startswith(b"\x89PNG")
