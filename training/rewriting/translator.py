"""Train pico-translator, an M2M100 for what travellers say: `python -m training.rewriting.translator`."""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import permutations
from pathlib import Path
from random import Random

import sentencepiece
import torch
import torch.nn.functional as F
import transformers as tf

from serve_app.distill import loop
from training.cards import parameters, put_card, trained_steps
from training.export import export
from training.rewriting.sentences import LANGUAGES, make
from training.threads import Threads

OUT = Path("checkpoints/pico-translator")
POSITIONS, PIECES = 128, 640
WAYS = list(permutations(range(len(LANGUAGES)), 2))
CARD = """\
---
license: apache-2.0
language: [en, de, fr]
library_name: transformers
---
# pico-translator

An M2M100 of {params:,} parameters (2 encoder and 2 decoder layers, width 128) that translates simple sentences of
travellers between English, German and French, in any direction. It is small on purpose: it gives the server a real
translator that answers in moments on a CPU.

## Data

Sentences made by `training/rewriting/sentences.py` from patterns and lists of our own. Nothing else.

## Training

`python -m training.rewriting.translator` (seed {seed}, {steps} steps of {batch} pairs, AdamW): a few minutes on two
CPU cores.

## Score

Share of {count} held-out sentences that are translated to the letter, greedy:

| from | to | right |
| --- | --- | --- |
{table}

The vocabulary is closed: held-out sentences have the words and patterns of training in combinations that it has not
seen. Nothing is known of other text.

## Limits

It knows trains, hours, days, places and a few things to buy. Of any other text it makes a sentence of its own. The
tokenizer has names for a hundred languages, as every M2M100's; three of them are known.
"""


def tokenizer(seed: int) -> tf.M2M100Tokenizer:
    rng = Random(f"{seed}:words")
    with tempfile.TemporaryDirectory() as folder:
        text, prefix = Path(folder, "text"), Path(folder, "pieces")
        text.write_text("\n".join(line for _ in range(4000) for line in make(rng, held_out=False)))
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(prefix), vocab_size=PIECES, character_coverage=1.0, minloglevel=2,
            num_threads=1, hard_vocab_limit=False,
        )  # fmt: skip
        pieces = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
        names = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size()))]
        vocab = Path(folder, "vocab.json")
        vocab.write_text(json.dumps({name: i for i, name in enumerate(names)}, ensure_ascii=False))
        words = tf.M2M100Tokenizer(str(vocab), f"{prefix}.model", model_max_length=POSITIONS)
        OUT.mkdir(parents=True, exist_ok=True)
        # While the pieces are there to be copied.
        words.save_pretrained(OUT)
    return tf.M2M100Tokenizer.from_pretrained(OUT)


def read(words: tf.M2M100Tokenizer, language: str, texts: list[str]) -> dict[str, torch.Tensor]:
    words.src_lang = language
    return dict(words(texts, return_tensors="pt", padding=True))


def batch(words: tf.M2M100Tokenizer, rng: Random, count: int, way: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """What is read and its mask, what the decoder is given, and what it is to write."""
    made = [make(rng, held_out=False) for _ in range(count)]
    given, wanted = (read(words, LANGUAGES[i], [row[i] for row in made]) for i in way)
    labels = wanted["input_ids"]
    before = torch.cat([torch.full((count, 1), 2), labels[:, :-1]], 1)
    return given["input_ids"], given["attention_mask"], before, labels.masked_fill(labels == 1, -100)


@torch.no_grad()
def score(folder: Path, count: int) -> dict[tuple[str, str], float]:
    """Share of held-out sentences that are translated to the letter, for each way."""
    model = tf.M2M100ForConditionalGeneration.from_pretrained(folder).eval()
    words = tf.M2M100Tokenizer.from_pretrained(folder)
    rng = Random("score")
    made = [make(rng, held_out=True) for _ in range(count)]
    found = {}
    for source, target in WAYS:
        right = 0
        for at in range(0, count, 50):
            rows = made[at : at + 50]
            given = read(words, LANGUAGES[source], [row[source] for row in rows])
            out = model.generate(**given, forced_bos_token_id=words.get_lang_id(LANGUAGES[target]))
            # After the first token and the language's name.
            told = words.batch_decode(out[:, 2:], skip_special_tokens=True)
            right += sum(said == row[target] for said, row in zip(told, rows, strict=True))
        found[LANGUAGES[source], LANGUAGES[target]] = right / count
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=1200)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=8)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--score", action="store_true", help="only score what is there, and write its card")
    a = p.parse_args()
    if not a.score:
        train(a)
    figures, count = score(OUT, 300), 300
    print(figures, flush=True)
    table = "\n".join(f"| {source} | {target} | {share:.1%} |" for (source, target), share in figures.items())
    said = {"params": parameters(OUT), "seed": a.seed, "steps": trained_steps(OUT), "batch": a.batch}
    put_card(OUT, CARD.format(**said, count=count, table=table))


def train(a: argparse.Namespace) -> None:
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    words = tokenizer(a.seed)
    top = max(words.get_lang_id(language) for language in words.lang_code_to_token)
    config = tf.M2M100Config(
        # The languages' names stand behind the pieces.
        vocab_size=top + 1, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=POSITIONS,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, dropout=0.05,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    model = tf.M2M100ForConditionalGeneration(config).train()
    opts = loop.optimisers(model, a.lr, muon=False)
    progress = loop.Progress("pico-translator", a.steps)
    for step in range(a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps))
        rng = Random(f"{a.seed}:{step}")
        ids, mask, before, wanted = batch(words, rng, a.batch, rng.choice(WAYS))
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=before).logits
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        loop.update(model, opts)
        progress.add(step, a.batch, loss=loss.item())
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "max_length": 96}
    export(model, OUT, a.steps, ends)


if __name__ == "__main__":
    main()
