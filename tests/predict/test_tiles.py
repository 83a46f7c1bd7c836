"""Llama 4's processor of pictures, beside digests of what transformers' own gave (5.23.0, with torchvision 0.28.0,
which is not installed here)."""

from __future__ import annotations

import json
from hashlib import sha256
from io import BytesIO

import pytest
import torch
from PIL import Image

from serve_app.predict.tiles import TileProcessor, cuts_tiles
from tests import sight

# Width, height -> rows and columns of tiles, digest of `pixel_values`, with tiles of 32 pixels and at most four.
MADE = {
    (40, 30): (1, 2, "cb8524a2e564db32"), (64, 64): (2, 2, "2f8e380b0770de11"), (25, 70): (3, 1, "b6f85233a43252a5"),
    (9, 9): (1, 1, "22e47b6fde2944f7"), (90, 33): (1, 3, "5c93dc0ac9216cb0"), (500, 40): (1, 4, "26828dbf581f7b18"),
    (64, 8): (1, 2, "e3da9469b197719a"), (65, 8): (1, 3, "6613e037434bc8de"), (1, 1): (1, 1, "da862dbcf4bd90fc"),
    (33, 129): (4, 1, "0189ce4f27a9fefa"), (32, 32): (1, 1, "fa5be986827b6b37"), (32, 64): (2, 1, "5b8b924ae1aa5f45"),
    (31, 33): (2, 1, "158a376671ad5b53"), (200, 130): (2, 2, "3f51e12a01ced0f2"), (3, 300): (4, 1, "ad5fdbd9aff87419"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    settings = {
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 32, "width": 32},
        "max_patches": 4,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_tiles_are_those_of_transformers(folder):
    native = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    processor = TileProcessor(folder)
    assert cuts_tiles(folder)
    for seed, ((width, height), (rows, columns, digest)) in enumerate(MADE.items()):
        image = Image.open(BytesIO(sight.picture(width, height, seed))).convert("RGB")
        [tiles] = processor(images=image)["pixel_values"]
        assert tiles.shape == (rows * columns + (rows * columns > 1), 3, 32, 32) and tiles.dtype == torch.bfloat16
        if native:  # elsewhere torch resizes in float32
            assert sha256(tiles.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16] == digest


def test_settings_may_stand_with_the_whole_processors(folder):
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings | {"max_patches": 1}}))
    assert TileProcessor(folder)(images=Image.new("RGB", (90, 33)))["pixel_values"].shape[1] == 1
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Llama4Processor"}))
    assert TileProcessor(folder)(images=Image.new("RGB", (90, 33)))["pixel_values"].shape[1] == 4
