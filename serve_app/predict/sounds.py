"""Files with sound to what the encoder of a chat model hears: log-mel windows, the values of transformers'
``WhisperFeatureExtractor``, filled up with silence to whole windows."""

from __future__ import annotations

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.predict.predictor import BadInput, Item, Place
from serve_app.predict.speech.spectrum import Spectrum


class Sounds:
    """Sounds are decoded in another process, within limits."""

    def __init__(self, place: Place, *, frames: int, apart: bool) -> None:
        """``frames``: of a window. ``apart``: what is the loudest is looked for in each window, and not in the whole
        sound."""
        self._extractor = WhisperFeatureExtractor.from_pretrained(place.path, local_files_only=True)
        self._frames, self._apart = frames, apart
        self._decoder = Decoder()

    def close(self) -> None:
        self._decoder.close()

    def item(self, data: bytes) -> Item:
        """``windows`` [windows, mels, frames], and how many frames of each are ``heard`` and not filled up. Raises
        :class:`BadInput`.
        """
        try:
            samples = self._decoder.sound(data).samples
        except BadFile as refused:
            raise BadInput(f"audio: {refused}.") from None
        hop, each = self._extractor.hop_length, self._frames * self._extractor.hop_length
        padded = np.pad(samples, (0, -len(samples) % each))
        starts = range(0, len(padded), each)
        if self._apart:
            found = [Spectrum(self._extractor, padded[at : at + each]).window(0, self._frames) for at in starts]
        else:
            spectrum = Spectrum(self._extractor, padded)
            found = [spectrum.window(at // hop, self._frames) for at in starts]
        heard = [min(self._frames, -(-(len(samples) - at) // hop)) for at in starts]
        # A place of the encoder is two frames.
        size = len(found) * self._frames // 2
        return Item({"windows": torch.stack(found), "heard": torch.tensor(heard)}, size, kind=len(found))
