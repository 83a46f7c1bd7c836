"""How far a sound is from another one, by spectra at several resolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from training.hearing.voice import RATE
from training.speaking.espeak import HOP

MELS, WINDOW = 80, 1024
RESOLUTIONS = (256, 512, 1024)
# Magnitudes below are silence.
FLOOR = 1e-2


def magnitudes(sound: Tensor, size: int, hop: int, *, centred: bool = True) -> Tensor:
    """[N, bins, frames] of [N, samples]."""
    window = torch.hann_window(size)
    bare = torch.stft(sound, size, hop, window=window, center=centred, return_complex=True)
    return (bare.real.square() + bare.imag.square() + FLOOR**2).sqrt()


class Mel:
    """Logarithmic mel spectra with one column for each frame of `HOP` samples."""

    def __init__(self) -> None:
        bank = mel_filter_bank(WINDOW // 2 + 1, MELS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
        self._bank = torch.from_numpy(bank).float()

    def __call__(self, sound: Tensor) -> Tensor:
        around = F.pad(sound, [(WINDOW - HOP) // 2] * 2)
        spectrum = magnitudes(around, WINDOW, HOP, centred=False)
        return (self._bank.T @ spectrum).clamp_min(1e-5).log()


def spectral(said: Tensor, wanted: Tensor) -> Tensor:
    """Yamamoto et al. 2020: convergence of the magnitudes, and the distance of their logarithms."""
    total = said.new_zeros(())
    for size in RESOLUTIONS:
        got, true = magnitudes(said, size, size // 4), magnitudes(wanted, size, size // 4)
        total = total + (got - true).norm() / true.norm() + (got.log() - true.log()).abs().mean()
    return total / len(RESOLUTIONS)
