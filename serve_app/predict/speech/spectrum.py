"""The log-mel spectrum of a sound of any length, a window at a time.

The values are those of transformers' ``WhisperFeatureExtractor`` over the whole sound, whose floor depends on the
loudest place of all of it: that is looked for once, piece by piece, so that hours of sound need no more memory than
minutes.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

# Frames that are computed at once, while the loudest place is looked for.
PIECE = 3000
# Below the loudest, in powers of ten, nothing is heard.
DEPTH = 8.0


class Spectrum:
    """``samples``: int16. ``frames``: how many there are to hear, 100 a second; a sound that is shorter than a window
    is filled up with silence.
    """

    def __init__(self, extractor: WhisperFeatureExtractor, samples: npt.NDArray[np.int16]) -> None:
        self._samples = samples
        self._fft, self._hop = extractor.n_fft, extractor.hop_length
        self._length = max(len(samples), extractor.n_samples)
        self._window = torch.hann_window(self._fft)
        self._filters = torch.from_numpy(extractor.mel_filters).float().T.contiguous()
        self.frames = self._length // self._hop
        self._first = self._log(0, min(PIECE, self.frames))  # all of a sound of one window
        pieces = (self._log(at, min(at + PIECE, self.frames)) for at in range(PIECE, self.frames, PIECE))
        self._top = max(float(piece.max()) for piece in chain([self._first], pieces))

    def window(self, start: int, length: int) -> Tensor:
        """[mels, length] float32 from the frame ``start`` on; zeros behind the end."""
        end = min(start + length, self.frames)
        found = self._first[:, start:end] if end <= self._first.shape[-1] else self._log(start, end)
        found = (torch.maximum(found, torch.tensor(self._top - DEPTH)) + 4.0) / 4.0
        return torch.nn.functional.pad(found, (0, length - found.shape[-1]))

    def _log(self, start: int, end: int) -> Tensor:
        """[mels, end - start]: powers of ten."""
        half = self._fft // 2
        heard = self._heard(start * self._hop - half, (end - 1) * self._hop + half)
        found = torch.stft(heard, self._fft, self._hop, window=self._window, center=False, return_complex=True)
        return torch.clamp(self._filters @ (found.abs() ** 2).contiguous(), min=1e-10).log10()

    def _heard(self, start: int, end: int) -> Tensor:
        """Samples from -1 to 1; outside of the sound it is mirrored, as a centred transform has it."""
        inner = self._samples[max(start, 0) : max(min(end, len(self._samples)), 0)]
        if start >= 0 and end <= len(self._samples):
            return torch.from_numpy(inner.astype(np.float32) / 32768)
        places = np.abs(np.arange(start, end))
        places = np.where(places >= self._length, 2 * (self._length - 1) - places, places)
        found = np.zeros(end - start, np.float32)
        there = places < len(self._samples)
        found[there] = self._samples[places[there]].astype(np.float32) / 32768
        return torch.from_numpy(found)
