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
        # Behind them is silence alone.
        self._heard = min((len(samples) + self._fft // 2) // self._hop + 1, self.frames)
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
        half, last = self._fft // 2, min(end, self._heard)
        parts = []
        if start < last:
            heard = self._samples_from(start * self._hop - half, (last - 1) * self._hop + half)
            found = torch.stft(heard, self._fft, self._hop, window=self._window, center=False, return_complex=True)
            parts.append(self._filters @ (found.abs() ** 2).contiguous())
        if last < end:
            parts.append(torch.zeros(len(self._filters), end - max(start, last)))
        return torch.clamp(torch.cat(parts, -1) if len(parts) > 1 else parts[0], min=1e-10).log10()

    def _samples_from(self, start: int, end: int) -> Tensor:
        """Samples from -1 to 1; outside of the sound it is mirrored, as a centred transform has it."""
        found = np.zeros(end - start, np.float32)
        inner = self._samples[max(start, 0) : max(end, 0)]
        np.divide(inner, 32768, out=found[max(-start, 0) :][: len(inner)], dtype=np.float32)
        if start < 0:
            found[:-start] = self._mirrored(range(-start, max(-end, 0), -1))
        if end > self._length:
            at = max(start, self._length)
            found[at - start :] = self._mirrored(range(2 * (self._length - 1) - at, 2 * (self._length - 1) - end, -1))
        return torch.from_numpy(found)

    def _mirrored(self, places: range) -> npt.NDArray[np.float32]:
        at = np.fromiter(places, np.int64, len(places))
        found = np.zeros(len(at), np.float32)
        there = at < len(self._samples)
        found[there] = self._samples[at[there]] / np.float32(32768)
        return found
