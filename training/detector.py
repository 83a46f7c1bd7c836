"""Train pico-detector, a DETR that finds shapes on drawn scenes: `python -m training.detector` (needs pico-shapes).

Each of its nine queries answers for one cell of the picture, which is what a matching would have to find out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig, ResNetForImageClassification

from serve_app.distill import loop
from training.cards import parameters, trained_steps
from training.export import export
from training.scenes import CELLS, SHAPES, SIDE, Thing, draw
from training.shapes import PROCESSOR, finish, tensors
from training.threads import Threads

OUT = Path("checkpoints/pico-detector")
KNOWN = Path("checkpoints/pico-shapes")
CARD = """\
---
license: apache-2.0
library_name: transformers
---
# pico-detector

A DETR of {params:,} parameters (the stem and stages of pico-shapes, one layer of an encoder and two of a decoder of
width 64, 9 queries) that finds shapes on drawn scenes:
{shapes}.
It is small on purpose: it gives the server a real detector that answers in milliseconds on a CPU.

## Data

Scenes of 64 by 64 pixels drawn by `training/scenes.py`: one to five shapes of any colour that do not touch, with lines
and noise behind them. Nothing else.

## Training

`python -m training.detector` (seed {seed}, {steps} steps of {batch} scenes, AdamW; cross entropy, L1 and generalised
IoU). The backbone begins as pico-shapes; each query answers for one of the nine cells of the picture, so that no
matching is needed, and begins by looking there.

## Score

On 1,000 scenes that training has not seen, with the threshold 0.5: {recall:.1%} of the things are found with the right
name and a box of IoU 0.5 at least, and {precision:.1%} of what is told is right. The boxes' mean IoU is {iou:.2f}.

## Limits

It knows drawn shapes and nothing of photographs. Two things whose middles lie in the same ninth of the picture are
found as one.
"""


def boxes(things: list[Thing]) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes [9] (the last one: nothing) and boxes [9, 4] of middle and size, each relative to the picture."""
    kinds = torch.full((CELLS * CELLS,), len(SHAPES))
    found = torch.zeros(CELLS * CELLS, 4)
    for thing in things:
        left, top, right, bottom = (v / SIDE for v in thing.box)
        kinds[thing.cell] = thing.shape
        found[thing.cell] = torch.tensor([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top])
    return kinds, found


def batch(rng: Random, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = [draw(rng, rng.randrange(1, 6)) for _ in range(count)]
    wanted = [boxes(things) for _, things in made]
    return tensors([p for p, _ in made]), torch.stack([k for k, _ in wanted]), torch.stack([b for _, b in wanted])


def iou(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Intersection over union of boxes [N, 4] of middle and size, and the generalised one."""
    (a0, a1), (b0, b1) = ((x[:, :2] - x[:, 2:] / 2, x[:, :2] + x[:, 2:] / 2) for x in (a, b))
    inner = (torch.minimum(a1, b1) - torch.maximum(a0, b0)).clamp(min=0).prod(-1)
    union = a[:, 2:].prod(-1) + b[:, 2:].prod(-1) - inner
    outer = (torch.maximum(a1, b1) - torch.minimum(a0, b0)).prod(-1)
    plain = inner / union.clamp(min=1e-6)
    return plain, plain - (outer - union) / outer.clamp(min=1e-6)


@torch.no_grad()
def score(model: DetrForObjectDetection) -> dict[str, float]:
    model.eval()
    rng, nothing = Random("score"), len(SHAPES)
    there = told = hit = 0
    overlaps = []
    for _ in range(10):
        given, kinds, wanted = batch(rng, 100)
        out = model(given)
        share, best = out.logits.softmax(-1)[..., :nothing].max(-1)
        said, real = share > 0.5, kinds != nothing
        same = iou(out.pred_boxes.flatten(0, 1), wanted.flatten(0, 1))[0].view_as(share)
        right = said & real & (best == kinds) & (same >= 0.5)
        there, told, hit = there + int(real.sum()), told + int(said.sum()), hit + int(right.sum())
        overlaps.append(same[said & real])
    return {"recall": hit / there, "precision": hit / max(told, 1), "iou": torch.cat(overlaps).mean().item()}


@torch.no_grad()
def begin(model: DetrForObjectDetection) -> None:
    """The backbone knows shapes already, and each query looks at its cell first: what else takes most of the time."""
    known = ResNetForImageClassification.from_pretrained(KNOWN).resnet.state_dict()
    missing = model.model.backbone.model.load_state_dict(known, strict=False).missing_keys
    assert not missing, missing
    count = SIDE // 8
    width = model.config.d_model
    there = model.model.position_embedding if hasattr(model.model, "position_embedding") else None
    there = there or model.model.backbone.position_embedding
    found = there(shape=torch.Size((1, width, count, count)), device="cpu", dtype=torch.float32)
    places = found.reshape(-1, count, count, width)[0] if found.shape[-1] == width else found[0].permute(1, 2, 0)
    at = [int((cell + 0.5) / CELLS * count) for cell in range(CELLS)]
    model.model.query_position_embeddings.weight.copy_(torch.stack([places[y, x] for y in at for x in at]))
    # From transformers' own beginning, which is tiny, boxes do not move for hundreds of steps.
    for linear in model.bbox_predictor.layers:
        torch.nn.init.xavier_uniform_(linear.weight)
    for layer in model.model.decoder.layers:
        for projection in (layer.encoder_attn.q_proj, layer.encoder_attn.k_proj):
            projection.weight.copy_(1.5 * torch.eye(width))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=1400)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--resume", action="store_true", help="goes on from the weights in checkpoints/pico-detector")
    a = p.parse_args()
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    names = dict(enumerate(SHAPES))
    backbone = ResNetConfig.from_pretrained(KNOWN, out_features=["stage2"])
    config = DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=64, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0,
        num_queries=CELLS * CELLS, id2label=names, label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    model = DetrForObjectDetection(config).train()
    done = 0
    if a.resume:
        model, done = DetrForObjectDetection.from_pretrained(OUT).train(), trained_steps(OUT)
    else:
        begin(model)
    opts = loop.optimisers(model, a.lr, muon=False)
    progress = loop.Progress("pico-detector", a.steps)
    nothing = len(SHAPES)
    for step in range(a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps, warmup=100))
        given, kinds, wanted = batch(Random(f"{a.seed}:{done + step}"), a.batch)
        out = model(given)
        real = kinds != nothing
        found, aim = out.pred_boxes[real], wanted[real]
        name_loss = F.cross_entropy(out.logits.flatten(0, 1), kinds.flatten())
        box_loss = 5 * F.l1_loss(found, aim) + (1 - iou(found, aim)[1]).mean()
        loss = name_loss + box_loss
        loss.backward()
        loop.update(model, opts)
        progress.add(step, a.batch, name=name_loss.item(), box=box_loss.item())
        if (step + 1) % 300 == 0:
            print(score(model), flush=True)
            model.train()
    export(model, OUT, done + a.steps)
    figures = score(DetrForObjectDetection.from_pretrained(OUT))
    print(figures, flush=True)
    said = {"params": parameters(OUT), "shapes": ", ".join(SHAPES), "seed": a.seed, "batch": a.batch}
    said["steps"] = done + a.steps
    finish(model, OUT, done + a.steps, {**PROCESSOR, "image_processor_type": "DetrImageProcessor", "do_pad": False},
           CARD.format(**said, **figures))  # fmt: skip


if __name__ == "__main__":
    main()
