"""Files of strangers, decoded in a process of its own: what good ones give, and that bad ones are refused at once."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from serve_app.media import audio
from serve_app.media import decoder as media_decoder
from serve_app.media.audio import decode_audio
from serve_app.media.decoder import PROCESSES, Decoder, Interrupted, _Process, interrupted
from serve_app.media.encoding import Encoder
from serve_app.media.errors import BadFile
from serve_app.media.limits import MAX_SECONDS, MEMORY_BYTES, SAMPLE_RATE, longest_s
from tests.media.files import bad_pictures, bad_sounds, picture, sound
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def decoder():
    found = Decoder()
    found.image(picture())  # the process is up: bad files are timed below
    yield found
    found.close()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_are_what_pillow_says(decoder, kind, mode):
    data = picture(kind=kind, mode=mode)
    wanted = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoder.image(data), wanted)


def test_orientation_and_transparency_as_transformers_load_them(decoder):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = picture(kind="JPEG", exif=exif)
    turned = decoder.image(data)
    assert turned.shape == (40, 30, 3)
    assert np.array_equal(turned, np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data)))))
    assert decoder.image(picture(mode="RGBA")).shape == (30, 40, 3)
    assert decoder.image(picture(mode="P")).shape == (30, 40, 3)


def test_masks_are_what_is_transparent_or_else_bright(decoder):
    grey = picture(mode="L")
    assert np.array_equal(decoder.mask(grey), np.asarray(Image.open(BytesIO(grey))))
    shown = Image.open(BytesIO(picture(mode="RGBA")))
    opaque, out = BytesIO(), BytesIO()
    shown.save(opaque, "PNG")
    assert np.array_equal(decoder.mask(opaque.getvalue()), np.asarray(shown.convert("L")))
    alpha = Image.fromarray(np.arange(30 * 40, dtype=np.uint16).reshape(30, 40).astype(np.uint8))
    shown.putalpha(alpha)
    shown.save(out, "PNG")
    assert np.array_equal(decoder.mask(out.getvalue()), 255 - np.asarray(alpha))
    with pytest.raises(BadFile):
        decoder.mask(b"no picture")


@pytest.mark.parametrize("name", bad_pictures())
def test_bad_pictures_are_refused(decoder, name):
    with pytest.raises(BadFile) as refused:
        decoder.image(bad_pictures()[name])
    said = str(refused.value)
    assert len(said) > 20 and "0x" not in said and "Traceback" not in said


@pytest.mark.slow
def test_fifty_megapixels_are_taken_and_more_are_not(decoder):
    out = BytesIO()
    Image.new("L", (8000, 6250), 77).save(out, "PNG", compress_level=1)
    pixels = decoder.image(out.getvalue())
    assert pixels.shape == (6250, 8000, 3) and (pixels[::977, ::911] == 77).all()


def test_a_sound_is_one_channel_at_one_rate(decoder):
    for rate, channels in ((16_000, 1), (44_100, 2), (8000, 1)):
        found = decoder.sound(sound(2.0, rate, channels))
        assert abs(found.seconds - 2.0) < 0.01 and found.milliseconds == pytest.approx(2000, abs=10)
        middle = found.samples[8000:24_000].astype(np.float32)
        # Of a tone of 440 Hz most lies there.
        power = np.abs(np.fft.rfft(middle)) ** 2
        assert power.argmax() == 440 and power[435:446].sum() > 0.99 * power.sum()
    plain = decoder.sound(sound(0.5))
    times = np.arange(8000) / SAMPLE_RATE
    assert np.array_equal(plain.samples, (np.sin(2 * np.pi * 440 * times) * 8000).astype(np.int16))


@pytest.mark.parametrize(("container", "codec"), [
    ("flac", "flac"), ("mp3", "mp3"), ("ogg", "libopus"), ("mp4", "aac"), ("webm", "libopus"),
    ("adts", "aac"),
])  # fmt: skip
def test_compressed_sounds_are_heard(decoder, container, codec):
    found = decoder.sound(compressed(container, codec, 1.0))
    assert 0.9 < found.seconds < 1.2
    power = np.abs(np.fft.rfft(found.samples[3000:13_000].astype(np.float32))) ** 2
    assert power.argmax() == 275  # 440 Hz in 10,000 samples


def test_a_sound_is_no_longer_than_is_reserved_for_its_size(decoder):
    silence = compressed("flac", "flac", 60.0, loud=0.0)
    assert longest_s(len(silence)) < 60
    with pytest.raises(BadFile, match="file of its size may hold"):
        decoder.sound(silence)
    assert longest_s(0) >= 30 and longest_s(1 << 40) == MAX_SECONDS


def compressed(container: str, codec: str, seconds: float, loud: float = 0.3) -> bytes:
    import av

    out = BytesIO()
    times = np.arange(int(seconds * 48_000)) / 48_000
    tone = np.sin(2 * np.pi * 440 * times).astype(np.float32) * loud
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone[None, :], format="fltp", layout="mono")
        frame.sample_rate = 48_000
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=48_000)
        fifo = av.AudioFifo()
        for piece in resampler.resample(frame):
            fifo.write(piece)
        while (part := fifo.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("name", bad_sounds())
def test_bad_sounds_are_refused(decoder, name):
    with pytest.raises(BadFile) as refused:
        decoder.sound(bad_sounds()[name])
    assert len(str(refused.value)) > 15


def test_a_length_is_told_without_the_samples(decoder):
    assert decoder.length(sound(0.5), 1.0) == decoder.length(sound(0.5), 0.5) == 8000
    with pytest.raises(BadFile, match="longer than 0.4 seconds; send it in parts"):
        decoder.length(sound(0.5), 0.4)
    with pytest.raises(BadFile, match="it is no sound"):
        decoder.length(picture(), 1e9)


@pytest.mark.parametrize("kind", ["flac", "mp3"])
def test_a_sound_that_says_it_is_too_long_is_refused_undecoded(kind, monkeypatch):
    encoder = Encoder(kind, SAMPLE_RATE, streamed=False)
    long = encoder.feed(np.zeros(SAMPLE_RATE * 8, np.int16).tobytes()) + encoder.finish()
    assert sum(map(len, decode_audio(long, 8.5))) > 2 * SAMPLE_RATE * 7.5
    monkeypatch.setattr(audio, "_frames", None)
    with pytest.raises(BadFile, match="longer than 0.1 seconds; send it in parts"):
        next(decode_audio(long, 0.1))


def test_a_process_that_hangs_is_ended_and_the_next_file_has_another():
    found = Decoder(image_s=0.0)
    before = time.monotonic()
    with pytest.raises(BadFile, match="within 0 seconds"):
        found.image(picture())
    assert time.monotonic() - before < 10
    found._seconds["image"] = 30.0
    assert found.image(picture()).shape == (30, 40, 3)
    found.close()


def test_a_process_that_has_ended_since_the_last_file_is_nobodys_fault():
    found = Decoder()
    found.image(picture())
    process = found._idle.get()
    process._process.kill()
    process._process.wait()
    found._idle.put(process)
    assert found.image(picture()).shape == (30, 40, 3)
    found.close()


@pytest.mark.parametrize(("times", "refused"), [(1, False), (2, True)])
def test_a_new_process_that_somebody_kills_is_tried_once_more(monkeypatch, times, refused):
    """Whose fault it is cannot be told: the kernel kills what takes the machine's last memory."""
    found, ask, asked = Decoder(), _Process.ask, []

    def killed(process, *args):
        asked.append(process)
        if len(asked) <= times:
            process._process.kill()
        return ask(process, *args)

    monkeypatch.setattr(_Process, "ask", killed)
    if refused:
        with pytest.raises(BadFile, match="memory, or is damaged"):
            found.image(picture())
    else:
        assert found.image(picture()).shape == (30, 40, 3)
    assert len(asked) == 2
    found.close()


def test_who_is_interrupted_ends_the_process_and_the_next_file_has_another():
    found, stop = Decoder(), threading.Event()
    found.image(picture())
    process = found._idle.get()
    found._idle.put(process)
    os.kill(process._process.pid, signal.SIGSTOP)  # it would take for ever
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(Interrupted):
        contextvars.copy_context().run(lambda: (interrupted.set(stop), found.image(picture())))
    assert process._process.returncode == -signal.SIGKILL
    assert found.image(picture()).shape == (30, 40, 3)
    found.close()


def test_the_process_has_bounds_and_leaves_nothing_behind(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    decoder.image(picture())
    with pytest.raises(BadFile):
        decoder.image(b"none")
    assert list(tmp_path.iterdir()) == []
    process = decoder._idle.get()
    pid = process._process.pid
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert str(MEMORY_BYTES) in limits
    decoder._idle.put(process)
    assert os.path.exists(f"/proc/{pid}")


def test_a_disk_that_takes_no_file_uses_up_no_process(decoder, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(media_decoder, "_scratch", full)
        for _ in range(PROCESSES + 1):
            with pytest.raises(OSError, match="No space"):
                decoder.image(picture())
    assert decoder.image(picture()).shape == (30, 40, 3)


def test_a_process_that_is_killed_while_it_waits_for_a_file_leaves_none(tmp_path):
    """What is decoded lies in a file without a name, where the file system has such files."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except (AttributeError, OSError):
        pytest.skip("there are no files without a name here")
    waits = """
import os, signal, sys
from serve_app.media.decoder import Decoder
decoder = Decoder()
decoder.image(open(sys.argv[1], "rb").read())
process = decoder._idle.get()
decoder._idle.put(process)
os.kill(process._process.pid, signal.SIGSTOP)
print(process._process.pid, flush=True)
decoder.image(open(sys.argv[1], "rb").read())
"""
    (tmp_path / "picture.png").write_bytes(picture())
    command = [sys.executable, "-c", waits, str(tmp_path / "picture.png")]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    asks = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)})
    assert asks.stdout is not None
    decodes = int(asks.stdout.readline())
    try:
        # It has a file by the time that it has asked.
        wait_for(lambda: any("scratch" in os.readlink(path) for path in Path(f"/proc/{asks.pid}/fd").iterdir()))
    finally:
        asks.kill()
        asks.wait()
        os.kill(decodes, signal.SIGKILL)
    assert list(scratch.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads another process's environment in /proc")
def test_what_decodes_files_of_strangers_knows_no_secret(monkeypatch):
    monkeypatch.setenv("SERVE_APP_DATABASE", "postgresql+psycopg://u:a-password-of-ours@host/name")
    found = Decoder()
    try:
        found.image(picture())
        process = found._idle.get()
        said = Path(f"/proc/{process._process.pid}/environ").read_text()
        found._idle.put(process)
    finally:
        found.close()
    assert "PYTHONPATH=" in said and "a-password-of-ours" not in said
