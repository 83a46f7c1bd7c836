"""How much memory large files take at most: of the process that decodes, and of the worker beside it.

Each is measured in processes of its own, by the kernel's own mark (``VmHWM``), and printed: ``pytest -m slow -s``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serve_app.media.decoder import Decoder, _Process
from serve_app.media.encoding import Encoder
from serve_app.media.limits import SAMPLE_RATE
from serve_app.wire.generate import Failed
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec
from tests.predict.conftest import call, saved
from tests.predict.test_small_tasks import PICTURES
from tests.predict.test_speech import whisper

HOURS = 2


def peak_mb(process: str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def measured(task: str, folder: str, small: bytes, large: bytes) -> tuple[int, int, int, dict]:
    """Peaks of a worker after ``small`` and after ``large``, that of the process that decoded, and the result."""
    spec = WorkerSpec("@cf/test/model", "predictor", {"path": folder}, f"{folder}.yaml", folder, task=task,
                      dtype="float32", max_batch_tokens=1024)  # fmt: skip
    started, begin = [], _Process.__init__

    def noted(process: _Process) -> None:
        begin(process)
        started.append(process)

    _Process.__init__ = noted
    work = PredictWork(spec, lambda step: None)

    async def both() -> tuple[int, dict]:
        await work.predict(call(small))
        before = peak_mb()
        if task == "automatic-speech-recognition":
            # Its windows are computed one by one, each like those of a short sound.
            item = await asyncio.to_thread(work._predictor.prepare, large, {})
            return before, dict(item.units)
        found = await work.predict(call(large))
        return before, {"error": found.error} if isinstance(found, Failed) else json.loads(found.results[0])

    before, result = asyncio.run(both())
    return before, peak_mb(), max(peak_mb(str(one._process.pid)) for one in started), result


def frames(samples: np.ndarray) -> bytes:
    """Of an MP3, without the tag before them: they can be repeated."""
    encoder = Encoder("mp3", SAMPLE_RATE, bit_rate=32_000, streamed=True)
    data = encoder.feed(samples.tobytes()) + encoder.finish()
    return data[10 + data[9] :] if data.startswith(b"ID3") else data


def run(*arguments: object) -> tuple[int, int, int, dict]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measured, arguments)
    before, after, decoded, result = found
    assert "error" not in result, result
    print(f"\n{arguments[0]}: the decoder {decoded} MB; the worker {after} MB, {after - before} more than before")
    return found


@pytest.mark.slow
def test_two_hours_of_sound(tmp_path):
    whisper(tmp_path / "model", 3, multilingual=False)
    noise = np.random.default_rng(1).integers(-3000, 3000, 60 * SAMPLE_RATE).astype(np.int16)
    second, minute = frames(noise[:SAMPLE_RATE]), frames(noise)
    before, after, decoded, heard = run(
        "automatic-speech-recognition", str(tmp_path / "model"), second, minute * (60 * HOURS)
    )
    assert heard["audio_ms"] == pytest.approx(HOURS * 3600_000, rel=0.01)
    # The samples lie in a file, whose pages count while they are mapped.
    mapped = HOURS * 3600 * SAMPLE_RATE * 2 >> 20
    assert decoded < 250 and after - before < mapped + 150


@pytest.mark.slow
def test_fifty_megapixels(tmp_path):
    config_class, model_class, processor_class, fields = PICTURES["vit"]
    folder = saved(model_class(config_class(**fields)), tmp_path / "model", processor_class)
    files = []
    for width, height in ((64, 48), (8000, 6250)):
        out = BytesIO()
        Image.new("RGB", (width, height), (9, 99, 199)).save(out, "PNG", compress_level=1)
        files.append(out.getvalue())
    before, after, decoded, found = run("image-classification", str(folder), *files)
    assert len(found) == 5
    assert decoded < 500 and after - before < 1000


def test_a_length_keeps_no_samples():
    """What is only counted is not kept."""
    found = Decoder()
    data = frames(np.zeros(20 * SAMPLE_RATE, np.int16))
    assert found.length(data * 30, 3600.0) >= 600 * SAMPLE_RATE
    process = found._idle.get()
    found._idle.put(process)
    assert peak_mb(str(process._process.pid)) < 100
    found.close()
