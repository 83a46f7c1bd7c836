"""Train pico-summary, a BART that sums short reports up: `python -m training.rewriting.summariser`."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from serve_app.distill import loop
from training.cards import parameters, put_card, trained_steps
from training.export import export
from training.rewriting.reports import make
from training.threads import Threads

OUT = Path("checkpoints/pico-summary")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
POSITIONS = 256
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---
# pico-summary

A BART of {params:,} parameters (2 encoder and 2 decoder layers, width 128, byte-level BPE) that sums up a short English
report of an accident in one sentence: what, where, when, why, and who was harmed. It is small on purpose: it gives the
server a real summariser that answers in moments on a CPU.

## Data

Reports made by `training/rewriting/reports.py` from patterns and lists of our own: three sentences that matter among
one to four that do not. Nothing else.

## Training

`python -m training.rewriting.summariser` (seed {seed}, {steps} steps of {batch} reports, AdamW): a few minutes on
two CPU cores.

## Score

Of {count} held-out reports, {exact:.1%} are summed up word for word as they should be, greedy; {facts:.1%} of all facts
are told right. The vocabulary is closed: held-out reports have the patterns, towns, causes and numbers of training, and
only what happened where, when, why and to how many has never been seen together. Nothing is known of other text.

## Limits

It knows six kinds of accidents, ten towns and a few causes. Of any other text it makes a report of its own.
"""


def tokenizer(seed: int) -> tf.PreTrainedTokenizerFast:
    """Byte-level pieces of the reports and their summaries."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    rng = Random(f"{seed}:words")
    core.train_from_iterator((" ".join(make(rng, held_out=False)) for _ in range(4000)), trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        mask_token="<mask>", model_max_length=POSITIONS,
    )  # fmt: skip


def batch(words: tf.PreTrainedTokenizerFast, rng: Random, count: int) -> tuple[torch.Tensor, ...]:
    """What is read and its mask, what the decoder is given, and what it is to write."""
    made = [make(rng, held_out=False) for _ in range(count)]
    read = words([text for text, _ in made], return_tensors="pt", padding=True)
    wanted = words([summary for _, summary in made], return_tensors="pt", padding=True)["input_ids"]
    given = torch.cat([torch.full((count, 1), 2), wanted[:, :-1]], 1)
    return read["input_ids"], read["attention_mask"], given, wanted.masked_fill(wanted == 1, -100)


@torch.no_grad()
def score(folder: Path, count: int) -> dict[str, float]:
    """Shares of held-out reports summed up word for word, and of their facts told right."""
    model = tf.BartForConditionalGeneration.from_pretrained(folder).eval()
    words = tf.AutoTokenizer.from_pretrained(folder)
    rng = Random("score")
    made = [make(rng, held_out=True) for _ in range(count)]
    told: list[str] = []
    for at in range(0, count, 50):
        given = words([text for text, _ in made[at : at + 50]], return_tensors="pt", padding=True)
        out = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        told += words.batch_decode(out, skip_special_tokens=True)
    told = [text.strip() for text in told]
    pairs = [(text, summary) for text, (_, summary) in zip(told, made, strict=True)]
    facts = [part in text for text, summary in pairs for part in _facts(summary)]
    exact = sum(text == summary for text, summary in pairs)
    return {"count": count, "exact": exact / count, "facts": sum(facts) / len(facts)}


def _facts(summary: str) -> list[str]:
    """Its day, what and where, why, and who was harmed."""
    day, rest = summary.split(": ", 1)
    what, harmed = rest.split("; ")
    where, cause = what.split(", caused by ")
    return [day, where, cause, harmed]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=260)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--score", action="store_true", help="only score what is there, and write its card")
    a = p.parse_args()
    if not a.score:
        train(a)
    figures = score(OUT, 500)
    print(figures, flush=True)
    said = {"params": parameters(OUT), "seed": a.seed, "steps": trained_steps(OUT), "batch": a.batch}
    put_card(OUT, CARD.format(**said, **figures))


def train(a: argparse.Namespace) -> None:
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    words = tokenizer(a.seed)
    config = tf.BartConfig(
        vocab_size=len(words), d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=POSITIONS,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
        dropout=0.05,
    )  # fmt: skip
    model = tf.BartForConditionalGeneration(config).train()
    opts = loop.optimisers(model, a.lr, muon=False)
    progress = loop.Progress("pico-summary", a.steps)
    for step in range(a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps))
        read, mask, given, wanted = batch(words, Random(f"{a.seed}:{step}"), a.batch)
        logits = model(input_ids=read, attention_mask=mask, decoder_input_ids=given).logits
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        loop.update(model, opts)
        progress.add(step, a.batch, loss=loss.item())
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "max_length": 64}
    export(model, OUT, a.steps, ends)
    words.save_pretrained(OUT)


if __name__ == "__main__":
    main()
