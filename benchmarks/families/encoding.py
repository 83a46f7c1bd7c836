"""One embedder or reranker: our flat or padded batches beside transformers, one sequence at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.families.generation import lengths_of
from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import Readout
from serve_app.models.encoders.encoder import EncoderModel
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.loading.folder import UnsupportedModel

LENGTHS = (1, 2, 5, 17, 33, 60, 61, 90, 130, 200)  # with seed 0
ALLOWED = 2e-4  # of the largest value
# A random model may multiply roundings by thousands, where it attends to one of two tokens that score nearly alike:
# ours may be so many times as far from float64 as transformers' own, and beyond a limit nothing can be told.
OF_NOISE, TOO_NOISY = 4.0, 0.05


def compare(model_class: Any, folder: Path, seed: int, task: str) -> tuple[str, str, str]:
    """(served by, verdict, note) of a checkpoint; verdict is ``exact``, ``wrong`` or ``refused``."""
    try:
        model = load_encoder(folder, "reranker" if task == "reranking" else "embeddings")
    except UnsupportedModel as refusal:
        return "refused", "refused", str(refusal).replace(f"{folder}/", "").replace(str(folder), "the folder")
    served = "flat batches" if model.flat else "padded batches"
    reference = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    try:
        note = _differs(model, reference, seed, task)
    except NoTruth as reason:
        return "-", "untried", str(reason)
    return served, "wrong" if note else "exact", note


class NoTruth(Exception):
    """Roundings of float32 change a random model's results altogether."""


def _differs(model: EncoderModel, reference: Any, seed: int, task: str) -> str:
    rng = np.random.default_rng(seed)
    lengths = lengths_of(seed) if seed else LENGTHS
    longest = min(model.max_length, max(lengths))
    texts = [rng.integers(5, model.vocab_size, min(n, longest)).astype(np.int32) for n in lengths]
    # The models' own heads take the last token that is no padding, wherever it stands.
    pad = getattr(reference.config.get_text_config(), "pad_token_id", None)
    texts = [np.where(ids == pad, ids - 1 if pad == model.vocab_size - 1 else ids + 1, ids) for ids in texts]
    wanted = np.stack([_alone(reference, ids, model, task) for ids in texts])
    readout = Readout(pooling=model.readout.pooling, normalise=False, sigmoid=False)
    for name, budget in (("one at a time", 1), ("together", 1 << 14), ("in batches of 150 tokens", 150)):
        batcher = EncodeBatcher(model, token_budget=budget)
        try:
            got = np.asarray(batcher.submit(texts, readout).result(60)).reshape(len(texts), -1)
        finally:
            batcher.close()
        errors = distances(got, wanted)
        if float(errors.max()) > ALLOWED:
            truth, noise = exactly(reference, texts, wanted, model, task)
            if noise > TOO_NOISY:
                raise NoTruth(f"roundings alone change its results by {noise:.2g}; other random weights may do")
            errors = distances(got, truth)
            if float(errors.max()) > max(ALLOWED, OF_NOISE * noise):
                worst = int(errors.argmax())
                return f"{name}: {len(texts[worst])} tokens differ by {errors[worst]:.2g}"
    return ""


def distances(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of each row the largest difference, as a share of the largest value of all."""
    return np.abs(got - wanted.reshape(got.shape)).max(1) / max(float(np.abs(wanted).max()), 1e-6)


def exactly(
    reference: Any, texts: list[np.ndarray], wanted: np.ndarray, model: EncoderModel, task: str
) -> tuple[np.ndarray, float]:
    """Rows in float64, and how far float32 is from them: transformers' own rows ``wanted``, and what comes of weights
    that differ in their last bits."""
    double = copy.deepcopy(reference).double()
    rows = np.stack([_alone(double, ids, model, task) for ids in texts])
    noise = float(distances(wanted.reshape(rows.shape), rows).max())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        moved = copy.deepcopy(double)
        for weight in moved.parameters():
            weight.data *= 1 + 2**-22 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        near = np.stack([_alone(moved, ids, model, task) for ids in texts])
        noise = max(noise, float(distances(near, rows).max()))
    return rows, noise


@torch.inference_mode()
def _alone(reference: Any, ids: np.ndarray, model: EncoderModel, task: str) -> np.ndarray:
    inputs = {"input_ids": torch.from_numpy(ids[None]).long()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if task == "reranking":
        return reference(**inputs).logits[0].numpy()
    hidden = reference(**inputs).last_hidden_state[0]
    row = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[model.readout.pooling]
    return row.numpy()
