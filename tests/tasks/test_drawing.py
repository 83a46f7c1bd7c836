"""Drawing through a gateway: native shapes by model and by what is accepted, streams, units, prices, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from serve_app.wire.generate import Failed
from serve_app.wire.predict import PredictCall, Predicted, ProgressCall, ProgressTold
from tests.tasks.conftest import ACCOUNT

FILE, MODEL, CODED = "@cf/test/text-to-image", "@cf/test/draws", "@cf/test/coded"
PROMPT = "a red cat"


def opened(parcel: bytes) -> tuple[dict, bytes]:
    head, _, files = parcel.partition(b"\n")
    return json.loads(head), files


def drawn(asked: dict, seed: int) -> str:
    """A picture of one colour, which the seed says."""
    size = (asked["width"] or 300, asked["height"] or 200)
    out = BytesIO()
    Image.new("RGB", size, (seed % 256, 0, 0)).save(out, asked["form"].upper())
    return base64.b64encode(out.getvalue()).decode()


class Worker:
    """Keeps what it was asked; ``gate`` is waited for."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict, bytes]] = []
        self.options: list[dict] = []
        self.gate: asyncio.Event | None = None
        self.left = 0

    async def __call__(self, model, method, call: PredictCall):
        [parcel] = call.inputs
        asked, files = opened(parcel)
        self.asked.append((asked, files))
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.left += 1
                raise
        if "refuse" in asked["prompt"]:
            return Failed("image: this model does not take one; leave it out.", refused=True)
        told = {"images": [drawn(asked, seed) for seed in asked["seeds"]], "seeds": asked["seeds"]}
        count = len(asked["seeds"])
        units = {"image_tiles": 4 * count, "image_steps": asked["steps"] * count}
        units["image_tile_steps"] = 4 * units["image_steps"]
        return Predicted((json.dumps(told).encode(),), units)


@pytest.fixture
async def served(serve, tmp_path: Path):
    """A model that answers with files, and one with JSON."""
    folder = tmp_path / "models"
    (folder / "weights").mkdir(parents=True)
    for model, drawing, price in (
        (MODEL, "side: 1024, steps: 20, most_steps: 20", ""),
        (CODED, "steps: 4, most_steps: 8, guidance: 0, answer: json, form: jpeg", "{neurons: {tile: 4.8, step: 9.6}}"),
    ):
        (folder / f"{model.rpartition('/')[2]}.yaml").write_text(
            f'id: "{model}"\ntask: text-to-image\ndescription: Of a test.\ncreated_at: "2026-01-02"\n'
            f"weights: {{path: weights}}\ndrawing: {{{drawing}}}\nserving: {{local: {{predictor: {{}}}}}}\n"
            + (f"price: {price}\n" if price else "")
        )
    worker = Worker()
    async with serve(worker, models=(MODEL, CODED)) as found:
        yield found, worker


def run(model: str) -> str:
    return f"{ACCOUNT}/run/{model}"


async def test_the_answer_is_what_the_model_and_the_client_say(served):
    found, worker = served
    raw = await found.http.post(run(MODEL), json={"prompt": PROMPT, "seed": 7})
    assert raw.headers["content-type"] == "image/png" and Image.open(BytesIO(raw.content)).size == (1024, 1024)
    asked, files = worker.asked[0]
    assert files == b"" and asked == {
        "prompt": PROMPT, "negative_prompt": None, "width": 1024, "height": 1024, "steps": 20, "guidance": 7.5,
        "strength": 1.0, "seeds": [7], "form": "png", "quality": None, "watch": "", "files": [0, 0],
    }  # fmt: skip
    coded = await found.http.post(run(CODED), json={"prompt": PROMPT, "steps": 8, "height": 512, "width": 768})
    picture = Image.open(BytesIO(base64.b64decode(coded.json()["result"]["image"])))
    assert picture.format == "JPEG" and picture.size == (768, 512)
    assert (worker.asked[1][0]["steps"], worker.asked[1][0]["guidance"]) == (8, 0)
    for accept, media in (
        ("application/json", "application/json"), ("application/json, */*", "image/png"), ("image/*", "image/png"),
        ("image/webp", "image/webp"), ("image/jpeg, application/json", "image/jpeg"), ("*/*", "image/png"),
    ):  # fmt: skip
        told = await found.http.post(run(MODEL), json={"prompt": PROMPT}, headers={"Accept": accept})
        assert told.headers["content-type"] == media, accept
        if media == "application/json":
            assert set(told.json()["result"]) == {"image"}
        else:
            assert Image.open(BytesIO(told.content)).format == media.rpartition("/")[2].upper()
    file = await found.http.post(run(CODED), json={"prompt": PROMPT}, headers={"Accept": "image/png"})
    assert file.headers["content-type"] == "image/png"
    # Whoever calls the handle, and batches, get JSON.
    assert "image" in (await found.gateway.run_handle(MODEL, {"prompt": PROMPT}))["result"]


async def test_fields(served):
    found, worker = served
    image, mask = b"\x00picture", b"mask"
    body = {
        "prompt": PROMPT, "negative_prompt": "dog", "image": list(image), "mask": list(mask), "num_steps": 5,
        "strength": 0.5, "guidance": 3, "seed": 2**63 - 1,
    }  # fmt: skip
    await found.http.post(run(MODEL), json=body)
    asked, files = worker.asked.pop()
    assert files == image + mask and asked["files"] == [len(image), len(mask)]
    assert (asked["negative_prompt"], asked["strength"], asked["steps"]) == ("dog", 0.5, 5)
    assert (asked["width"], asked["height"], asked["seeds"]) == (None, None, [2**63 - 1])
    for named in ({"image_b64": base64.b64encode(image).decode()},
                  {"image": "data:image/png;base64," + base64.b64encode(image).decode()}):  # fmt: skip
        await found.http.post(run(MODEL), json={"prompt": PROMPT, "width": 256, **named})
        asked, files = worker.asked.pop()
        assert files == image and (asked["width"], asked["height"]) == (256, 256)
    seeds = set()
    for _ in range(3):
        await found.http.post(run(MODEL), json={"prompt": PROMPT})
        seeds.add(worker.asked.pop()[0]["seeds"][0])
    assert len(seeds) == 3


async def test_what_is_refused(served):
    found, worker = served
    for body in (
        {}, {"prompt": ""}, {"prompt": 5}, {"prompt": "x" * 2049}, {"prompt": "x", "num_steps": 21},
        {"prompt": "x", "num_steps": 0}, {"prompt": "x", "width": 255}, {"prompt": "x", "height": 2049},
        {"prompt": "x", "width": 512.5}, {"prompt": "x", "guidance": -1}, {"prompt": "x", "strength": 1.5},
        {"prompt": "x", "image": "not base64!"}, {"prompt": "x", "image": [256]}, {"prompt": "x", "mask": [1]},
        {"prompt": "x", "seed": -1}, {"prompt": "x", "negative_prompt": 5}, {"prompt": "x", "stream": "yes"},
    ):  # fmt: skip
        refused = await found.http.post(run(MODEL), json=body)
        assert refused.status_code == 400 and refused.json()["errors"][0]["code"] == 5006, body
    assert (await found.http.post(run(CODED), json={"prompt": "x", "steps": 9})).status_code == 400
    assert worker.asked == [] and found.endings == []
    refused = await found.http.post(run(MODEL), json={"prompt": "refuse this"})
    assert refused.status_code == 400 and "leave it out" in refused.text
    assert found.settled[0].entry is None


async def test_units_and_prices(served):
    found, _ = served
    await found.http.post(run(CODED), json={"prompt": PROMPT})
    units = found.settled[0].entry.units
    assert (units["image_tiles"], units["image_steps"], units["image_tile_steps"]) == (4, 4, 16)
    assert found.settled[0].entry.neurons == (4 * 4_800_000 + 4 * 9_600_000)
    told = await found.http.post(run(CODED), json={"prompt": PROMPT, "options": {"estimate": True}})
    found_units = told.json()["result"]
    assert found_units["units"]["expected"] == {"image_tiles": 4, "image_steps": 4, "image_tile_steps": 16}
    assert found_units["neurons"]["least"] == found_units["neurons"]["most"] == 57.6
    sent = {"prompt": PROMPT, "image": [1], "options": {"estimate": True}}
    most = (await found.http.post(run(CODED), json=sent)).json()["result"]["units"]
    assert (most["least"]["image_tiles"], most["most"]["image_tiles"], most["most"]["input_tiles"]) == (1, 16, 16)


async def test_progress_is_told(served, monkeypatch):
    found, worker = served
    worker.gate = asyncio.Event()
    steps = iter([ProgressTold(), ProgressTold(2, 4), ProgressTold(2, 4), ProgressTold(3, 4)])
    watched = []

    async def ask_all(model, method, call: ProgressCall):
        watched.append(call.watch)
        if (told := next(steps, None)) is None:
            worker.gate.set()
            raise RuntimeError("a replica that ends")
        return [ProgressTold(), told]

    monkeypatch.setattr("serve_app.tasks.text_to_image.run.LOOK_S", 0.01)
    monkeypatch.setattr("serve_app.tasks.text_to_image.run.REFUSED_S", 0.01)
    found.gateway.runtime.ask_all = ask_all
    events = await found.http.post(run(CODED), json={"prompt": PROMPT, "stream": True, "seed": 3})
    assert events.headers["content-type"].startswith("text/event-stream")
    data = [line[6:] for line in events.text.splitlines() if line.startswith("data: ")]
    told = [json.loads(one) for one in data[:-1]]
    assert data[-1] == "[DONE]" and told[:-1] == [{"step": done, "steps": 4} for done in (0, 2, 3)]
    assert told[-1]["seed"] == 3 and Image.open(BytesIO(base64.b64decode(told[-1]["image"]))).format == "JPEG"
    assert set(watched) == {worker.asked[0][0]["watch"]} and found.endings == [("text-to-image", "done")]


async def test_streams_that_are_refused(served, monkeypatch):
    """With a status where the worker says so at once, and otherwise by their last event."""
    found, worker = served
    native, elsewhere = {"prompt": "refuse this", "stream": True}, "/v1/images/generations"
    told = await found.http.post(run(MODEL), json=native)
    assert told.status_code == 400 and "leave it out" in told.json()["errors"][0]["message"]
    assert (await found.http.post(elsewhere, json={"model": MODEL, **native})).status_code == 400

    async def ask_all(model, method, call):
        worker.gate.set()  # the stream has begun
        return []

    for name in ("REFUSED_S", "LOOK_S"):
        monkeypatch.setattr(f"serve_app.tasks.text_to_image.run.{name}", 0.01)
    found.gateway.runtime.ask_all = ask_all
    for route, body in ((run(MODEL), native), (elsewhere, {"model": MODEL, **native})):
        worker.gate = asyncio.Event()
        told = await found.http.post(route, json=body)
        assert told.status_code == 200
        last = json.loads(told.text.splitlines()[-2].removeprefix("data: "))
        assert "leave it out" in json.dumps(last.get("errors") or last["error"])
    assert found.endings == [("text-to-image", "failed")] * 4


async def test_who_leaves_ends_the_work(served):
    found, worker = served
    worker.gate = asyncio.Event()
    asking = asyncio.ensure_future(found.http.post(run(MODEL), json={"prompt": PROMPT}))
    while not worker.asked:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert worker.left == 1 and found.endings == [("text-to-image", "left")] and found.settled[0].entry is None
