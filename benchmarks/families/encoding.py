"""One embedder or reranker: our flat or padded batches beside transformers, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from serve_app.engine.encoder.batcher import EncodeBatcher
from serve_app.engine.encoder.types import Readout
from serve_app.models.encoder import EncoderModel
from serve_app.models.encoder_load import load_encoder
from serve_app.models.folder import UnsupportedModel

LENGTHS = (1, 2, 5, 17, 33, 60, 61, 90, 130, 200)
ALLOWED = 2e-4  # of the largest value


def compare(model_class: Any, folder: Path, seed: int, task: str) -> tuple[str, str, str]:
    """(served by, verdict, note) of a checkpoint; verdict is ``exact``, ``wrong`` or ``refused``."""
    try:
        model = load_encoder(folder, "reranker" if task == "reranking" else "embeddings")
    except UnsupportedModel as refusal:
        return "refused", "refused", str(refusal).replace(f"{folder}/", "").replace(str(folder), "the folder")
    served = "flat batches" if model.flat else "padded batches"
    reference = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    note = _differs(model, reference, seed, task)
    return served, "wrong" if note else "exact", note


def _differs(model: EncoderModel, reference: Any, seed: int, task: str) -> str:
    rng = np.random.default_rng(seed)
    longest = min(model.max_length, max(LENGTHS))
    texts = [rng.integers(5, model.vocab_size, min(n, longest)).astype(np.int32) for n in LENGTHS]
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
        errors = np.abs(got - wanted.reshape(got.shape)).max(1) / max(float(np.abs(wanted).max()), 1e-6)
        if float(errors.max()) > ALLOWED:
            worst = int(errors.argmax())
            return f"{name}: {len(texts[worst])} tokens differ by {errors[worst]:.2g}"
    return ""


@torch.inference_mode()
def _alone(reference: Any, ids: np.ndarray, model: EncoderModel, task: str) -> np.ndarray:
    inputs = {"input_ids": torch.from_numpy(ids[None]).long()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if task == "reranking":
        return reference(**inputs).logits[0].float().numpy()
    hidden = reference(**inputs).last_hidden_state[0].float()
    row = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[model.readout.pooling]
    return row.numpy()
