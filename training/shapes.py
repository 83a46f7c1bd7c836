"""Train pico-shapes, a ResNet that names the shape on a drawn picture: `python -m training.shapes`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from transformers import ResNetConfig, ResNetForImageClassification

from serve_app.distill import loop
from training.cards import parameters, put_card
from training.export import export
from training.scenes import SHAPES, SIDE, draw_one
from training.threads import Threads

OUT = Path("checkpoints/pico-shapes")
# As transformers' image processors have it.
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True, "size": {"height": SIDE, "width": SIDE}, "resample": 2,
    "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
CARD = """\
---
license: apache-2.0
library_name: transformers
---
# pico-shapes

A ResNet of {params:,} parameters (three stages of 32, 64 and 128 channels) that names the shape on a drawn picture:
{shapes}. It is small on purpose: it gives the server a real image classifier that answers in
milliseconds on a CPU.

## Data

Pictures of 64 by 64 pixels drawn by `training/scenes.py`: one shape of any colour and size on a ground of any other
colour, with noise. Nothing else.

## Training

`python -m training.shapes` (seed {seed}, {steps} steps of {batch} pictures, AdamW): a few minutes on two CPU cores.

## Score

{held:.1%} of 2,000 pictures that training has not seen are named right; chance is {chance:.1%}.

## Limits

It knows drawn shapes and nothing of photographs: whatever it is shown, it names one of its {count} shapes.
"""


def tensors(pictures: list) -> torch.Tensor:
    """[N, 3, H, W] as the processor makes them."""
    found = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(found).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


def batch(rng: Random, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = [draw_one(rng) for _ in range(count)]
    return tensors([picture for picture, _ in made]), torch.tensor([shape for _, shape in made])


@torch.no_grad()
def right(model: ResNetForImageClassification) -> float:
    model.eval()
    rng, hits = Random("score"), 0
    for _ in range(20):
        given, wanted = batch(rng, 100)
        hits += int((model(given).logits.argmax(-1) == wanted).sum())
    return hits / 2000


def finish(model: torch.nn.Module, out: Path, steps: int, processor: dict, card: str) -> None:
    """Weights, processor and card."""
    export(model, out, steps)
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    put_card(out, card)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=4)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    names = dict(enumerate(SHAPES))
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic",
        id2label=names, label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    model = ResNetForImageClassification(config).train()
    opts = loop.optimisers(model, a.lr, muon=False)
    progress = loop.Progress("pico-shapes", a.steps)
    for step in range(a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps))
        given, wanted = batch(Random(f"{a.seed}:{step}"), a.batch)
        loss = F.cross_entropy(model(given).logits, wanted)
        loss.backward()
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        progress.add(step, a.batch, loss=loss.item())
    export(model, OUT, a.steps)
    held = right(ResNetForImageClassification.from_pretrained(OUT))
    print({"held": held}, flush=True)
    card = CARD.format(
        params=parameters(OUT), shapes=", ".join(SHAPES), seed=a.seed, steps=a.steps, batch=a.batch, held=held,
        chance=1 / len(SHAPES), count=len(SHAPES),
    )  # fmt: skip
    finish(model, OUT, a.steps, PROCESSOR, card)


if __name__ == "__main__":
    main()
