"""A VITS model (Kim et al. 2021; MMS-TTS): sentences to samples.

Everything left to chance (durations, the prior) is drawn from torch's generator, seeded for each sentence: what comes
out is what transformers makes after ``torch.manual_seed``, whoever else is served. So sentences are computed one by
one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, VitsModel

from serve_app.predict.loading import load_model
from serve_app.predict.predictor import BadInput, Item, Place, Predictor, Run, Units


class Vits(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(VitsModel, place)
        self._tokenizer = AutoTokenizer.from_pretrained(place.path, local_files_only=True, trust_remote_code=False)
        for name, wants in (("phonemize", "phonemizer"), ("is_uroman", "uroman")):
            if getattr(self._tokenizer, name, False):
                raise ValueError(
                    f"the model reads what the program {wants} makes of a text, which is not part of this server; use "
                    "a model that reads letters, such as those of MMS-TTS without uroman"
                )
        self._reading = threading.Lock()
        config = self._model.config
        self._rate: int = config.sampling_rate
        self._voices: int = config.num_speakers
        self._own_speed: float = config.speaking_rate

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        text = data.decode()
        with self._reading:
            # Of a text without any of the model's letters blanks would be left.
            says = bool(self._tokenizer.prepare_for_tokenization(text)[0])
            ids = self._tokenizer(text)["input_ids"] if says else []
        speed = self._own_speed * (options.get("speed") or 1.0)
        return Item(ids, max(1, len(ids)), asked=(speed, self._voice(options), options.get("seed") or 0))

    def _voice(self, options: dict[str, Any]) -> int | None:
        """None: of a model with one voice, which every name stands for."""
        if self._voices <= 1:
            return None
        name = options.get("voice") or "0"
        if not name.isdecimal() or int(name) >= self._voices:
            raise BadInput(f"voice: this model has voices 0 to {self._voices - 1}, got {name!r}.")
        return int(name)

    def forward(self, items: Sequence[Item]) -> list[bytes]:
        return [self._said(item) for item in items]

    def _said(self, item: Item) -> bytes:
        """Little-endian int16."""
        if not item.value:
            return b""
        speed, voice, seed = item.asked
        torch.manual_seed(seed)
        ids = torch.tensor([item.value], device=self._model.device)
        sound = self._model(input_ids=ids, speaker_id=voice, speaking_rate=speed).waveform[0]
        return (sound.float().clamp(-1, 1) * 32767).round().to(torch.int16).cpu().numpy().astype("<i2").tobytes()

    async def answer(self, item: Item, run: Run) -> tuple[Any, Units]:
        [samples] = await run([item])
        count = len(np.frombuffer(samples, "<i2"))
        return {"samples": samples, "rate": self._rate}, {"audio_ms": -(-count * 1000 // self._rate)}

    def example(self) -> bytes:
        return b"a"
