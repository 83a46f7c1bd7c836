"""Train pico-vision, a LLaVA that answers questions about drawn pictures: `python -m training.vision`.

A small vision transformer learns to see alone, then with a projector and a small Llama. While it does, three heads that
are thrown away tell kind, colour and height of what is at each patch: what is worth seeing, long before answers can.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from serve_app.distill import loop
from training.cards import parameters, trained_steps
from training.export import export
from training.looking import COLOURS, NOTHING_TO_SEE, View, ask, stranger, view
from training.scenes import SHAPES, SIDE
from training.shapes import PROCESSOR, finish, tensors
from training.template import BEGIN, CONTROL, END, PAD
from training.threads import Threads
from training.tokenizer import SPLIT

OUT = Path("checkpoints/pico-vision")
IMAGE = "<image>"
PATCH, VOCAB = 8, 640
PLACES = (SIDE // PATCH) ** 2
KINDS = [*SHAPES, *map(str, range(10))]
# What a patch shows, and how many of each: heads that are thrown away tell it while the model learns.
TALLEST = 8
MARKS = {"kind": len(KINDS), "colour": len(COLOURS), "height": TALLEST}
LOOKED = 96
TURNS = 6
TEMPLATE = """\
{%- macro said(c) -%}
{%- if c is string -%}{{ c }}{%- else -%}
{%- for p in c -%}{%- if p.type == 'image' -%}<image>{%- else -%}{{ p.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|' ~ m.role ~ '|>' ~ said(m.content) ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
CARD = """\
---
license: apache-2.0
library_name: transformers
---
# pico-vision

A LLaVA of {params:,} parameters (a vision transformer of three layers that sees 64 by 64 pixels in 64 patches, a
projector, and a Llama of three layers) that answers questions about drawn pictures: what shape, what colour, how
many, is there one, what there is in all; which number; and which bar of a chart is the highest or the lowest, or
whether one is higher than another. It is small on purpose: it gives the server a real model that reads pictures and
text, and answers in milliseconds on a CPU.

## Data

Pictures of 64 by 64 pixels drawn by `training/looking.py`, on a grey ground with noise: one to five things (shapes:
{shapes}; and small digits) in the colours {colours}; numbers of one to three digits; charts of two to five bars; and
questions about them, in some wordings each. Nothing else.

## Training

`python -m training.vision`, then again with `--resume --steps 3000 --lr 1.5e-3` (seed {seed}, Muon and AdamW): first
the vision transformer alone, {looks} steps of {looked} pictures, then {steps} steps of {batch} conversations of {turns}
questions. Three heads that are thrown away tell kind, colour and height of what is at each patch all the while.

## Score

Share of answers that are right to the letter, of 1,500 questions about pictures that training has not seen, answered
greedily:

| question about | right |
| --- | --- |
{table}

## Limits

It knows drawn shapes, numbers and charts and nothing of photographs, and whatever it is asked it answers with what it
has learned. A picture of any size is made 64 by 64 pixels first. More than five things, and things that touch, are
beyond it.
"""


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the questions and answers; its first ids are the control tokens, its last a picture's."""
    tok = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(SPLIT, "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 1, special_tokens=list(CONTROL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    rng, lines = Random("tokenizer"), [NOTHING_TO_SEE]
    for _ in range(4000):
        seen = view(rng)
        for question in (ask(rng, seen), ask(rng, seen), stranger(rng)):
            lines += [question.text, question.answer]
    tok.train_from_iterator(lines, trainer)
    tok.add_special_tokens([IMAGE])
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tok.token_to_id(BEGIN))]
    )
    return tok


def config_of(tok: Tokenizer) -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE,
        patch_size=PATCH, projection_dim=128,
    )  # fmt: skip
    ends = {"bos_token_id": tok.token_to_id(BEGIN), "eos_token_id": tok.token_to_id(END),
            "pad_token_id": tok.token_to_id(PAD)}  # fmt: skip
    text = LlamaConfig(
        vocab_size=tok.get_vocab_size(), hidden_size=128, intermediate_size=320, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=True, rms_norm_eps=1e-5, **ends,
    )  # fmt: skip
    return LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=tok.token_to_id(IMAGE), vision_feature_layer=-1,
        vision_feature_select_strategy="default", tie_word_embeddings=True, image_seq_length=PLACES, **ends,
    )  # fmt: skip


@dataclass(slots=True)
class Given:
    """One step's data: pictures [P, 3, H, W]; tokens and what is to be said [N, T], -100 where nothing is; ``marks``
    [P, 3, places], see `patches`."""

    pictures: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor
    marks: torch.Tensor


def conversations(rng: Random, count: int, tok: Tokenizer) -> Given:
    pictures: list[Any] = []
    marks: list[torch.Tensor] = []
    rows: list[tuple[list[int], list[int]]] = []
    user, assistant, end = (tok.token_to_id(t) for t in ("<|user|>", "<|assistant|>", END))
    image = [tok.token_to_id(IMAGE)] * PLACES
    for _ in range(count):
        ids, labels = [tok.token_to_id(BEGIN)], [-100]
        # A second picture comes in the middle of some.
        again = rng.randrange(1, TURNS) if rng.random() < 0.15 else -1
        alone = rng.random() < 0.03
        seen: View | None = None
        for turn in range(TURNS):
            shown: list[int] = []
            if turn in (0, again) and not alone:
                seen = view(rng)
                pictures.append(seen.picture)
                marks.append(patches(seen.things))
                shown = image
            asked = stranger(rng) if rng.random() < 0.03 else ask(rng, seen or view(rng))
            answer = NOTHING_TO_SEE if alone else asked.answer
            text = tok.encode(asked.text, add_special_tokens=False).ids
            # Some show the picture behind the question.
            said = [*text, *shown] if shown and rng.random() < 0.1 else [*shown, *text]
            told = [*tok.encode(answer, add_special_tokens=False).ids, end]
            ids += [user, *said, end, assistant, *told]
            labels += [-100] * (len(said) + 3) + told
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    padded = [[row[k] + [fill] * (longest - len(row[k])) for row in rows] for k, fill in ((0, 0), (1, -100))]
    return Given(tensors(pictures), torch.tensor(padded[0]), torch.tensor(padded[1]), torch.stack(marks))


def patches(things: list[Any]) -> torch.Tensor:
    """[3, places]: kind, colour and height, in patches, of what lies in the middle of each; the last: nothing."""
    marks = np.array([[most] * PLACES for most in MARKS.values()])
    middles = (np.arange(SIDE // PATCH) + 0.5) * PATCH
    for thing in things:
        left, top, right, bottom = thing.box
        inside = ((middles > top) & (middles < bottom))[:, None] & ((middles > left) & (middles < right))[None]
        height = min(int((bottom - top) / PATCH), TALLEST - 1)
        marks[:, inside.ravel()] = np.array([[KINDS.index(thing.kind)], [[*COLOURS].index(thing.colour)], [height]])
    return torch.from_numpy(marks)


@torch.no_grad()
def score(model: LlavaForConditionalGeneration, tok: Tokenizer, questions: int) -> dict[str, float]:
    """By kind of question the share of answers that are right to the letter."""
    model.eval()
    rng, right, asked = Random("score"), Counter[str](), Counter[str]()
    head = [tok.token_to_id(BEGIN), tok.token_to_id("<|user|>"), *[tok.token_to_id(IMAGE)] * PLACES]
    tail = [tok.token_to_id(END), tok.token_to_id("<|assistant|>")]
    while asked.total() < questions:
        made = [view(rng) for _ in range(50)]
        wanted = [ask(rng, seen) for seen in made]
        ids = [[*head, *tok.encode(q.text, add_special_tokens=False).ids, *tail] for q in wanted]
        most = max(map(len, ids))
        left = torch.tensor([[0] * (most - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in ids])
        given = tensors([seen.picture for seen in made])
        out = model.generate(input_ids=left, attention_mask=mask, pixel_values=given, max_new_tokens=48,
                             do_sample=False)  # fmt: skip
        for question, row in zip(wanted, out[:, most:].tolist(), strict=True):
            asked[question.about] += 1
            right[question.about] += tok.decode(row) == question.answer
    found = {about: right[about] / asked[about] for about in sorted(asked)}
    return {**found, "all": right.total() / asked.total()}


def write_tokenizer(tok: Tokenizer, out: Path) -> None:
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    more = [t for t in (*CONTROL, IMAGE) if t not in names.values()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", **names, "add_bos_token": True, "model_max_length": 2048,
        "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE, "additional_special_tokens": more,
        "image_token": IMAGE,
    }  # fmt: skip
    processor = {
        "processor_class": "LlavaProcessor", "image_token": IMAGE, "patch_size": PATCH,
        "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("tokenizer.json", tok.to_str(pretty=False)),
        ("tokenizer_config.json", json.dumps(config, indent=2) + "\n"),
        ("special_tokens_map.json", json.dumps(names, indent=2) + "\n"),
        ("processor_config.json", json.dumps(processor, indent=2) + "\n"),
    ):
        part = out / f".{name}.part"
        part.write_text(text)
        os.replace(part, out / name)


def marks_loss(heads: torch.nn.ModuleDict, looked: torch.Tensor, marks: torch.Tensor) -> dict[str, torch.Tensor]:
    """How badly ``looked`` [P, places, width] tells what is at each patch; patches with something count as much as
    those with nothing, which are most."""
    losses = {}
    for mark, (name, nothing) in enumerate(MARKS.items()):
        wanted = marks[:, mark].flatten()
        each, something = (
            F.cross_entropy(heads[name](looked).flatten(0, 1), wanted, reduction="none"),
            wanted != nothing,
        )
        losses[name] = each[something].mean() + each[~something].mean()
    return losses


def look_loss(model: Any, heads: torch.nn.ModuleDict, rng: Random, count: int) -> dict[str, torch.Tensor]:
    views = [view(rng) for _ in range(count)]
    seen = model.model.vision_tower(tensors([each.picture for each in views]))
    return marks_loss(heads, seen.last_hidden_state[:, 1:], torch.stack([patches(each.things) for each in views]))


def step_loss(model: Any, heads: torch.nn.ModuleDict, given: Given) -> dict[str, torch.Tensor]:
    seen = model.model.get_image_features(pixel_values=given.pictures, return_dict=True)
    losses = marks_loss(heads, seen.last_hidden_state[:, 1:], given.marks)
    hidden = model.model(
        input_ids=given.ids, attention_mask=torch.ones_like(given.ids), mm_encoder_outputs={"image": seen}
    ).last_hidden_state
    wanted = given.labels[:, 1:]
    said = wanted != -100
    return {"said": F.cross_entropy(model.lm_head(hidden[:, :-1][said]), wanted[said]), **losses}


def look(model: Any, heads: torch.nn.ModuleDict, a: argparse.Namespace, threads: Threads) -> None:
    """Teaches the vision transformer alone to tell what is at each patch."""
    opts = loop.optimisers(model.model.vision_tower, a.lr)
    opts[0].add_param_group({"params": list(heads.parameters())})
    progress = loop.Progress("pico-vision looks", a.looks, every=100)
    for step in range(a.looks):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.looks, warmup=50))
        losses = look_loss(model, heads, Random(f"looks:{a.seed}:{step}"), LOOKED)
        sum(losses.values()).backward()
        loop.update(model.model.vision_tower, opts)
        progress.add(step, LOOKED * PLACES, **{name: loss.item() for name, loss in losses.items()})


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--looks", type=int, default=7000, help="steps of the eyes alone before")
    p.add_argument("--steps", type=int, default=2400)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--resume", action="store_true", help="goes on from the weights in checkpoints/pico-vision")
    a = p.parse_args()
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    tok = train_tokenizer()
    model, done = LlavaForConditionalGeneration(config_of(tok)).train(), 0
    if a.resume:
        model, done = LlavaForConditionalGeneration.from_pretrained(OUT).train(), trained_steps(OUT)
    width = model.config.vision_config.hidden_size
    heads = torch.nn.ModuleDict({name: torch.nn.Linear(width, most + 1) for name, most in MARKS.items()})
    if not a.resume:
        look(model, heads, a, threads)
    opts = loop.optimisers(model, a.lr)
    opts[0].add_param_group({"params": list(heads.parameters())})
    progress = loop.Progress("pico-vision", a.steps)
    for step in range(a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps, warmup=50))
        given = conversations(Random(f"{a.seed}:{done + step}"), a.batch, tok)
        losses = step_loss(model, heads, given)
        sum(losses.values()).backward()
        loop.update(model, opts)
        progress.add(step, given.ids.numel(), **{name: loss.item() for name, loss in losses.items()})
        if (step + 1) % 200 == 0:
            print(score(model, tok, 300), flush=True)
            model.train()
    end = tok.token_to_id(END)
    export(model, OUT, done + a.steps, {"eos_token_id": end, "bos_token_id": tok.token_to_id(BEGIN),
                                        "pad_token_id": tok.token_to_id(PAD), "do_sample": False})  # fmt: skip
    write_tokenizer(tok, OUT)
    figures = score(LlavaForConditionalGeneration.from_pretrained(OUT), tok, 1500)
    print(figures, flush=True)
    table = "\n".join(f"| {about} | {share:.1%} |" for about, share in figures.items())
    said = {"params": parameters(OUT), "shapes": ", ".join(SHAPES), "colours": ", ".join(COLOURS), "table": table}
    card = CARD.format(**said, seed=a.seed, steps=done + a.steps, batch=a.batch, turns=TURNS, looks=a.looks,
                       looked=LOOKED)  # fmt: skip
    finish(model, OUT, done + a.steps, PROCESSOR, card)


if __name__ == "__main__":
    main()
