"""Tiny random pipelines through the worker: the pixels that diffusers makes with the same seed."""

from __future__ import annotations

import asyncio
import base64
import json
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from serve_app.api.drawing import DrawRequest
from serve_app.predict.drawing.pipelines import REMEDY, UnsupportedPipeline, read_index
from serve_app.wire.generate import Failed
from serve_app.wire.predict import ProgressCall
from tests.predict import pipelines
from tests.predict.conftest import call

needs_diffusers = pytest.mark.skipif(
    find_spec("diffusers") is None, reason="diffusers is not installed (pip install serve-app[images])"
)
SIDE = 32


def request(prompt: str = "a red cat", *, steps: int = 3, seed: int = 7, **more: Any) -> DrawRequest:
    fields = {"width": SIDE, "height": SIDE, "guidance": 3.0, **more}
    return DrawRequest(prompt=prompt, steps=steps, seed=seed, **fields)


def picture(seed: int, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8))


def half(size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """A mask: the left half is to be drawn anew."""
    mask = np.zeros((size[1], size[0]), np.uint8)
    mask[:, : size[0] // 2] = 255
    return Image.fromarray(mask)


def png(image: Image.Image) -> bytes:
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def pixels(found: Any, number: int = 0) -> np.ndarray:
    told = json.loads(found.results[0])
    return np.asarray(Image.open(BytesIO(base64.b64decode(told["images"][number])))).astype(int)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


FAMILIES = {
    "1.5": pipelines.diffusion,
    "few steps": lambda folder: pipelines.diffusion(folder, lcm=True),
    "xl": pipelines.diffusion_xl,
    "flux": pipelines.flux,
}


@pytest.mark.parametrize("family", FAMILIES)
@needs_diffusers
@pytest.mark.slow
async def test_pictures_are_diffusers(work, tmp_path, family):
    import diffusers

    own = FAMILIES[family](tmp_path / "model")
    worker = work("text-to-image", tmp_path / "model")
    drawn = await worker.predict(call(request().parcel()))
    given = {"num_inference_steps": 3, "guidance_scale": 3.0}
    want = own("a red cat", width=SIDE, height=SIDE, generator=seeded(7), **given).images[0]
    assert np.array_equal(pixels(drawn), np.asarray(want)) and pixels(drawn).std() > 1
    assert drawn.units == {"image_tiles": 1, "image_steps": 3, "image_tile_steps": 3}

    start = picture(1)
    changed = await worker.predict(call(request(image=png(start), strength=0.7, steps=6).parcel()))
    change = diffusers.AutoPipelineForImage2Image.from_pipe(own)
    given = {"num_inference_steps": 6, "guidance_scale": 3.0, "strength": 0.7}
    sized = {"width": SIDE, "height": SIDE} if family == "flux" else {}
    want = change("a red cat", image=start, generator=seeded(7), **given, **sized).images[0]
    assert np.array_equal(pixels(changed), np.asarray(want))
    assert (
        changed.units["image_steps"] == changed.units["input_tile_steps"] == (4 if family in ("few steps", "xl") else 5)
    )

    filled = await worker.predict(call(request(image=png(start), mask=png(half()), strength=0.9, steps=6).parcel()))
    fill = diffusers.AutoPipelineForInpainting.from_pipe(own)
    given |= {"strength": 0.9, "width": SIDE, "height": SIDE}
    want = fill("a red cat", image=start, mask_image=half(), generator=seeded(7), **given).images[0]
    assert np.array_equal(pixels(filled), np.asarray(want))


def painter(folder: Path) -> Any:
    from serve_app.predict.drawing.painter import Painter
    from serve_app.predict.predictor import Place

    return Painter(Place(folder, "float32"))


@needs_diffusers
@pytest.mark.slow
async def test_requests_together_and_one_who_leaves(work, tmp_path):
    """Pictures that agree are one call; each is what it would be alone, but for rounding. Who leaves ends the work."""
    pipelines.diffusion(tmp_path / "model")
    worker = work("text-to-image", tmp_path / "model")
    alone = [pixels(await worker.predict(call(request(seed=seed).parcel()))) for seed in (1, 2, 3)]
    copies = request(seed=1, copies=3)
    together = await worker.predict(call(copies.parcel()))
    for number, want in enumerate(alone):
        assert np.abs(pixels(together, number) - want).max() <= 1
    assert together.units == {"image_tiles": 3, "image_steps": 9, "image_tile_steps": 9}
    assert not np.array_equal(alone[0], alone[1])
    again = await worker.predict(call(request(seed=1).parcel()))
    assert np.array_equal(pixels(again), alone[0])

    # A thousand steps would take minutes; the next picture waits for one of them only.
    leaves = asyncio.ensure_future(worker.predict(call(request(steps=900, negative_prompt="dog").parcel("w"))))
    while not worker.progress(ProgressCall("w")).done:
        await asyncio.sleep(0.01)
    assert worker.progress(ProgressCall("w")).steps == 900
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert worker.progress(ProgressCall("w")).steps == 0
    assert np.array_equal(pixels(await worker.predict(call(request(seed=1).parcel()))), alone[0])


@needs_diffusers
@pytest.mark.slow
async def test_what_is_refused_and_what_fits(work, tmp_path, monkeypatch):
    pipelines.diffusion(tmp_path / "model")
    pipelines.diffusion(tmp_path / "fills", channels=9)
    worker, fills = work("text-to-image", tmp_path / "model"), work("text-to-image", tmp_path / "fills")
    file = png(picture(1))
    for asked, words in (
        (request(width=33), "multiples of 2 pixels; take 32"),
        (request(image=b"no picture"), "image: it is no picture"),
        (request(image=file, mask=b"neither"), "mask: it is no picture"),
        (request(image=file, strength=0.1, steps=5), "less than one"),
        (request(image=png(picture(1, (2200, 32))), width=None, height=None), "2200 by 32"),
        (request(image=png(picture(1, (2048, 2048))), width=None, height=None, copies=5), "at most 4 pictures"),
    ):
        refused = await worker.predict(call(asked.parcel()))
        assert isinstance(refused, Failed) and refused.refused and words in refused.error, refused
    for asked in (request(), request(image=file)):
        refused = await fills.predict(call(asked.parcel()))
        assert isinstance(refused, Failed) and "a picture and its mask" in refused.error
    own = await worker.predict(call(request(image=png(picture(2, (41, 64))), width=None, height=None).parcel()))
    assert pixels(own).shape == (64, 40, 3)
    for form, sign in (("jpeg", b"\xff\xd8"), ("webp", b"RIFF")):
        made = await worker.predict(call(request(accept=f"image/{form}").parcel()))
        assert base64.b64decode(json.loads(made.results[0])["images"][0]).startswith(sign)

    inpaint = await fills.predict(call(request(image=file, mask=png(half()), steps=4).parcel()))
    assert pixels(inpaint).shape == (SIDE, SIDE, 3)

    # What does not fit into memory together is drawn one by one; what does not fit alone is refused.
    drawing = worker._predictor._ways.by_mode["draw"]
    real, called = type(drawing).__call__, []

    def small(self, prompt, **given):
        called.append(len(prompt))
        if len(prompt) > 1 or prompt == ["cat"]:
            raise torch.OutOfMemoryError
        return real(self, prompt=prompt, **given)

    monkeypatch.setattr(type(drawing), "__call__", small)
    monkeypatch.setattr(type(worker._predictor._ways), "takes", lambda self, mode: frozenset(given_names))
    given_names = ("prompt", "width", "height", "num_inference_steps", "guidance_scale", "generator")
    both = await worker.predict(call(request(seed=1, copies=2).parcel()))
    assert len(json.loads(both.results[0])["images"]) == 2 and called == [2, 1, 1]
    refused = await worker.predict(call(request("cat").parcel()))
    assert isinstance(refused, Failed) and "memory" in refused.error


def index(folder: Path, **value: Any) -> Path:
    (folder / "unet").mkdir(parents=True, exist_ok=True)
    (folder / "unet" / "x.safetensors").touch()
    (folder / "model_index.json").write_text(json.dumps(value))
    return folder


def test_folders_that_are_not_loaded(tmp_path):
    """Nothing is imported that a folder names, and no code of it is run."""
    good = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"], "image_encoder": [None, None]}
    assert read_index(index(tmp_path / "good", **good))[1] == "FluxPipeline"
    for number, value in enumerate(
        (
            {}, {"_class_name": ["mine", "Mine"]}, {"_class_name": "DiffusionPipeline"}, {"_class_name": ""},
            {**good, "vae": ["os", "system"]}, {**good, "vae": [["os"], "x"]}, {**good, "vae": ["transformers"]},
            {**good, "vae": ["transformers", "RagRetriever"]}, {**good, "vae": ["diffusers", "DiffusionPipeline"]},
        )
    ):  # fmt: skip
        with pytest.raises(UnsupportedPipeline):
            read_index(index(tmp_path / str(number), **value))
    (tmp_path / "good" / "unet" / "mine.py").write_text("raise SystemExit")
    with pytest.raises(UnsupportedPipeline, match="holds code"):
        read_index(tmp_path / "good")
    with pytest.raises(UnsupportedPipeline, match="no model_index.json"):
        read_index(tmp_path)


async def test_without_diffusers_the_remedy_is_told(work, tmp_path, monkeypatch):
    """And no weights are looked for."""
    monkeypatch.setattr("serve_app.tasks.text_to_image.worker.installed", lambda: False)
    worker = work("text-to-image", tmp_path / "nothing")
    told = await worker.predict(call(request().parcel()))
    assert isinstance(told, Failed) and told.refused and told.error == REMEDY
