"""How fast and how rightly speech is written down, against transformers' pipeline and faster-whisper on equal weights.

    python -m benchmarks speech [MODEL_DIR] [--sounds FOLDER] [--faster-whisper PYTHON] [--json]

MODEL_DIR is a Whisper, by default the one that comes with the project. Sounds are held-out sentences of its
vocabulary that espeak-ng speaks (it must be on the path), or the files of ``--sounds``: ``NAME.wav`` with what is
said in ``NAME.txt``.
Each variant begins with the bytes of WAV files, decoding included, and answers greedily with times of segments:
``one by one``, as a single user waits, and ``together``, all at once (ours as so many requests of the worker).
``--long S`` strings sounds together until they last that long, which goes window by window.

A *real-time factor* is seconds of processing over seconds of sound, with all threads of this process. ``processor_s``
are this process's seconds of processor time per second of sound, which a busy machine changes less. Rounds alternate
between the variants; medians are reported. Our text must be the pipeline's for every sound. Without
``--faster-whisper``, the Python of an environment that has it (and transformers, to convert the weights), that row is
left out.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.checks import Checks
from serve_app.media.limits import SAMPLE_RATE
from serve_app.wire.generate import Failed
from serve_app.wire.predict import PredictCall
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec
from training.hearing.recogniser import errors

PICO = Path(__file__).resolve().parents[2] / "checkpoints" / "pico-hearing"
# Texts of sounds, in their order.
Run = Callable[[Sequence[bytes]], list[str]]


class Sound(NamedTuple):
    """``data``: a WAV file. ``text``: what is said in it, if that is known."""

    data: bytes
    text: str

    @property
    def seconds(self) -> float:
        with wave.open(io.BytesIO(self.data)) as file:
            return file.getnframes() / file.getframerate()


def wav(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype(np.int16).tobytes())
    return out.getvalue()


def samples_of(data: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(data)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLE_RATE, 1, 2):
            raise SystemExit(f"sounds must be WAV files of {SAMPLE_RATE} Hz, one channel and 16 bits")
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def spoken(count: int, seed: int) -> list[Sound]:
    """Held-out sentences of pico-hearing's vocabulary, by voices that its training has heard."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng speaks the sounds (Debian: apt install espeak-ng); --sounds FOLDER takes others")
    from training.hearing.recogniser import say

    return [Sound(wav(one.samples), one.text) for one in say(Random(f"speech {seed}"), count, held_out=True)]


def read(folder: Path) -> list[Sound]:
    found = []
    for path in sorted(folder.glob("*.wav")):
        text = path.with_suffix(".txt")
        found.append(Sound(path.read_bytes(), text.read_text().strip() if text.exists() else ""))
    return found


def strung(sounds: Sequence[Sound], seconds: float) -> Sound:
    """Sounds one after the other, with a pause between two, until they last so long."""
    pause, parts, texts = np.zeros(SAMPLE_RATE // 2, np.int16), list[np.ndarray](), list[str]()
    while sum(map(len, parts)) < seconds * SAMPLE_RATE:
        one = sounds[len(texts) % len(sounds)]
        parts += [samples_of(one.data), pause]
        texts.append(one.text)
    return Sound(wav(np.concatenate(parts)), " ".join(texts))


class Ours:
    """The worker of speech recognition, in this process; ``most`` windows are computed at once."""

    def __init__(self, path: Path, threads: int, most: int) -> None:
        positions = json.loads((path / "config.json").read_text())["max_source_positions"]
        spec = WorkerSpec("@cf/benchmark/speech", "predictor", {"path": str(path)}, str(path / "x.yaml"), str(path),
                          task="automatic-speech-recognition", dtype="float32", cpu_threads=threads,
                          max_batch_tokens=most * positions)  # fmt: skip
        self._work = PredictWork(spec, lambda step: None)

    async def _one(self, data: bytes) -> str:
        told = await self._work.predict(PredictCall((data,), b'{"task": "transcribe"}'))
        if isinstance(told, Failed):
            raise SystemExit(f"no figures: the worker refuses a sound: {told.error}")
        return str(json.loads(told.results[0])["text"])

    def one_by_one(self, sounds: Sequence[bytes]) -> list[str]:
        async def run() -> list[str]:
            return [await self._one(data) for data in sounds]

        return asyncio.run(run())

    def together(self, sounds: Sequence[bytes]) -> list[str]:
        async def run() -> list[str]:
            return list(await asyncio.gather(*map(self._one, sounds)))

        return asyncio.run(run())


class Pipeline:
    """transformers' pipeline as its users call it."""

    def __init__(self, path: Path, batch_size: int) -> None:
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration, pipeline

        model = WhisperForConditionalGeneration.from_pretrained(path, local_files_only=True, use_safetensors=True)
        words = AutoTokenizer.from_pretrained(path)
        words.pad_token = words.pad_token or words.eos_token
        self._pipeline: Any = pipeline(
            "automatic-speech-recognition", model=model.eval(), tokenizer=words,
            feature_extractor=WhisperFeatureExtractor.from_pretrained(path),
        )  # fmt: skip
        self._batch = batch_size

    def _run(self, sounds: Sequence[bytes], batch: int) -> list[str]:
        given = [{"raw": samples_of(data).astype(np.float32) / 32768, "sampling_rate": SAMPLE_RATE} for data in sounds]
        asked: dict[str, Any] = {"num_beams": 1}  # five by default
        if self._pipeline.model.generation_config.is_multilingual:
            asked["task"] = "transcribe"
        told = self._pipeline(given, batch_size=batch, return_timestamps=True, generate_kwargs=asked)
        return [one["text"] for one in told]

    def one_by_one(self, sounds: Sequence[bytes]) -> list[str]:
        return [self._run([data], 1)[0] for data in sounds]

    def together(self, sounds: Sequence[bytes]) -> list[str]:
        return self._run(sounds, self._batch)


class FasterWhisper:
    """faster-whisper on the same weights, in a process of its own; it has no call for several sounds."""

    def __init__(self, python: str, path: Path, threads: int) -> None:
        program = str(Path(__file__).with_name("faster_whisper_side.py"))
        self._process = subprocess.Popen(
            [python, "-P", program, str(path), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}, cwd="/",
        )  # fmt: skip
        self._line()  # that it is ready

    def _line(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("no figures: faster-whisper ended by itself")
        return json.loads(line)

    def one_by_one(self, sounds: Sequence[bytes]) -> list[str]:
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            names = []
            for number, data in enumerate(sounds):
                (Path(folder) / f"{number}.wav").write_bytes(data)
                names.append(str(Path(folder) / f"{number}.wav"))
            self._process.stdin.write(json.dumps(names).encode() + b"\n")
            self._process.stdin.flush()
            return [str(text) for text in self._line()]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def word_error_rate(texts: Sequence[str], sounds: Sequence[Sound]) -> float | None:
    """None where it is not known what is said."""
    counts = [errors(text, one.text) for text, one in zip(texts, sounds, strict=True) if one.text]
    words = sum(total for _, total in counts)
    return sum(wrong for wrong, _ in counts) / words if words else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks speech", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="?", default=PICO)
    parser.add_argument("--sounds", type=Path, metavar="FOLDER", help="of NAME.wav, with NAME.txt where it is known")
    parser.add_argument("--count", type=int, default=64, help="sentences that espeak-ng speaks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", type=float, default=120, metavar="S", help="of the long sound; 0 for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="in sounds or windows, as the records have it")
    parser.add_argument("--faster-whisper", metavar="PYTHON", help="of an environment that has it and transformers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    sounds = read(args.sounds) if args.sounds else spoken(args.count, args.seed)
    if not sounds:
        raise SystemExit(f"there is no .wav file in {args.sounds}")
    ours, pipeline = (
        Ours(args.model_dir.resolve(), args.threads, args.batch_size),
        Pipeline(args.model_dir, args.batch_size),
    )
    torch.set_num_threads(args.threads)
    peer = FasterWhisper(args.faster_whisper, args.model_dir.resolve(), args.threads) if args.faster_whisper else None
    sets = {"one by one": sounds, "together": sounds}
    if args.long:
        sets["long"] = [strung(sounds, args.long)]
    runs: dict[tuple[str, str], Run] = {}
    for name in sets:
        runs[name, "ours"] = ours.together if name == "together" else ours.one_by_one
        runs[name, "transformers"] = pipeline.together if name == "together" else pipeline.one_by_one
        if peer and name != "together":
            runs[name, "faster_whisper"] = peer.one_by_one
    for run in runs.values():
        run([sounds[0].data])
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    computed: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    texts: dict[tuple[str, str], list[str]] = {}
    checks = Checks()
    for _ in range(args.rounds):
        for (name, side), run in runs.items():
            started, before = time.perf_counter(), time.process_time()
            told = run([one.data for one in sets[name]])
            seconds[name, side].append(time.perf_counter() - started)
            computed[name, side].append(time.process_time() - before)
            texts[name, side] = told
    for (name, side), told in texts.items():
        if side == "ours":
            wanted = [text.strip() for text in texts[name, "transformers"]]
            for number, (text, other) in enumerate(zip(told, wanted, strict=True)):
                checks.equal(f"{name}, sound {number}", text.strip(), other)
    if peer:
        peer.close()
    checks.require()
    results: dict[str, Any] = {"model": args.model_dir.name, "sounds": len(sounds), "threads": args.threads}
    for name, given in sets.items():
        length = sum(one.seconds for one in given)
        took = {side: statistics.median(runs_s) for (of, side), runs_s in seconds.items() if of == name}
        results[name] = {"sound_s": round(length, 1)}
        for side, median in took.items():
            results[name][side] = {
                "real_time_factor": round(median / length, 5),
                "word_error_rate": word_error_rate(texts[name, side], given),
            }
            if side != "faster_whisper":  # its process is another
                results[name][side]["processor_s"] = round(statistics.median(computed[name, side]) / length, 5)
            if side != "ours":
                results[name][f"times_{side}"] = round(median / took["ours"], 2)
        if not args.json:
            print(f"{name} ({length:.0f} s of sound): {json.dumps(results[name])}")
    if args.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
