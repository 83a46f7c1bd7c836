"""Train pico-hearing, a Whisper that understands commands: `python -m training.hearing.recogniser`."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from serve_app.distill import loop
from serve_app.predict.speech.spectrum import Spectrum
from training.cards import parameters, put_card, trained_steps
from training.export import export
from training.hearing.commands import make
from training.hearing.voice import RATE, Samples, speak, voice
from training.threads import Threads

OUT = Path("checkpoints/pico-hearing")
WINDOW_S, MELS, PIECES, POSITIONS = 6, 40, 448, 96
END = "<|endoftext|>"
SPECIAL = (END, "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>",
           "<|nospeech|>", "<|notimestamps|>")  # fmt: skip
MARKS = [f"<|{i * 0.02:.2f}|>" for i in range(WINDOW_S * 50 + 1)]
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---
# pico-hearing

A Whisper of {params:,} parameters (3 encoder and 2 decoder layers, width 128, windows of six seconds) that writes down
what people say to a house: commands and questions in a vocabulary of some ninety words, with times of its segments. It
is small on purpose: it gives the server a real recogniser that answers in moments on a CPU.

## Data

Sentences made by `training/hearing/commands.py`, spoken by espeak-ng in four accents and fifteen voices, with pauses
and noise. Nothing else: no human voice.

## Training

`python -m training.hearing.recogniser` (seed {seed}, {steps} steps of {batch} windows, Muon and AdamW; needs
espeak-ng).

## Score

Word error rate of {count} held-out sentences, greedy, spoken by

| voices | word error rate |
| --- | --- |
| that training has heard | {heard:.1%} |
| that it has not heard | {unheard:.1%} |

Held-out sentences have the words and patterns of training in combinations that it has not seen.

## Limits

It knows its ninety words and the voices of one synthesiser. Whatever else it hears it writes down as one of its own
sentences.
"""


@dataclass(slots=True, frozen=True)
class Spoken:
    text: str
    samples: Samples


def tokenizer(seed: int) -> tf.WhisperTokenizer:
    """Pieces of the sentences, then the control tokens, then the times."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rng = Random(f"{seed}:words")
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator((f" {make(rng, held_out=False)}" for _ in range(4000)), trainer)
    OUT.mkdir(parents=True, exist_ok=True)
    merges = [tuple(line.split(" ")) for line in _merges(core)]
    made = tf.WhisperTokenizer(vocab=core.get_vocab(), merges=merges, unk_token=END, bos_token=END, eos_token=END)
    made.add_special_tokens({"additional_special_tokens": [name for name in SPECIAL if name != END]})
    made.add_tokens([tf.AddedToken(name, special=False, normalized=False) for name in MARKS])
    return made


def _merges(core: Tokenizer) -> list[str]:
    core.model.save(str(OUT))
    lines = (OUT / "merges.txt").read_text().splitlines()
    for name in ("merges.txt", "vocab.json"):
        (OUT / name).unlink()
    return [line for line in lines if not line.startswith("#version")]


def config_of(words: tf.WhisperTokenizer) -> tf.WhisperConfig:
    end = words.convert_tokens_to_ids(END)
    return tf.WhisperConfig(
        vocab_size=len(words), num_mel_bins=MELS, d_model=128, encoder_layers=3, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=384, decoder_ffn_dim=384,
        max_source_positions=WINDOW_S * 50, max_target_positions=POSITIONS, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, decoder_start_token_id=words.convert_tokens_to_ids(SPECIAL[1]), dropout=0.05,
    )  # fmt: skip


def say(rng: Random, count: int, *, held_out: bool = False, unheard: bool = False) -> list[Spoken]:
    wanted = [(make(rng, held_out=held_out), voice(rng, unheard=unheard)) for _ in range(count)]
    with ThreadPoolExecutor(2) as threads:
        return [
            Spoken(text, samples)
            for (text, _), samples in zip(wanted, threads.map(lambda w: speak(*w), wanted), strict=True)
        ]


def window(rng: Random, pool: list[Spoken]) -> tuple[Samples, list[tuple[float, float | None, str]]]:
    """Six seconds in which one to three sentences are said, the last one perhaps cut off: its end is None."""
    room, at = WINDOW_S * RATE, round(rng.uniform(0, 0.8) * RATE)
    sound = np.zeros(room, np.float32)
    said: list[tuple[float, float | None, str]] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        one = rng.choice(pool)
        end = at + len(one.samples)
        part = one.samples[: room - at].astype(np.float32) * rng.uniform(0.3, 1.0)
        sound[at : at + len(part)] = part
        said.append((at / RATE, end / RATE if end <= room else None, one.text))
        at = end + round(rng.uniform(0.15, 0.9) * RATE)
        if at > room - RATE // 4:
            break
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 10 ** rng.uniform(0.5, 2.6), room)
    return np.clip(sound + noise, -32768, 32767).astype(np.int16), said


def target(words: tf.WhisperTokenizer, said: list[tuple[float, float | None, str]], *, marks: bool) -> list[int]:
    start, end = (words.convert_tokens_to_ids(name) for name in (SPECIAL[1], END))
    ids = [start] if marks else [start, words.convert_tokens_to_ids("<|notimestamps|>")]
    first = words.convert_tokens_to_ids(MARKS[0])
    for begin, until, text in said:
        if until is None and (marks or said.index((begin, until, text))):
            # Of what is cut off only its begin is told, from which the next window starts.
            return [*ids, first + round(begin * 50), end] if marks else [*ids, end]
        piece = words(f" {text}", add_special_tokens=False)["input_ids"]
        ids += [first + round(begin * 50), *piece, first + round((until or 0) * 50)] if marks else piece
    return [*ids, end]


def batch(
    words: tf.WhisperTokenizer, extractor: tf.WhisperFeatureExtractor, rng: Random, count: int, pool: list[Spoken]
):
    """Spectra [N, mels, frames], what the decoder is given and what it is to write [N, T]."""
    heard, rows = [], []
    for _ in range(count):
        sound, said = window(rng, pool)
        # Where times are not told nothing may be cut off.
        marks = said[-1][1] is None or rng.random() < 0.8
        heard.append(Spectrum(extractor, sound).window(0, WINDOW_S * 100))
        rows.append(target(words, said, marks=marks))
    most = max(map(len, rows))
    end = words.convert_tokens_to_ids(END)
    given = torch.tensor([row[:-1] + [end] * (most - len(row)) for row in rows])
    wanted = torch.tensor([row[1:] + [-100] * (most - len(row)) for row in rows])
    return torch.stack(heard), given, wanted


def errors(said: str, wanted: str) -> tuple[int, int]:
    """Words that were put in, left out or replaced, and words in all."""
    a, b = ("".join(c for c in text.lower() if c.isalpha() or c == " ").split() for text in (said, wanted))
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1], len(b)


@torch.no_grad()
def score(folder: Path, spoken: list[Spoken]) -> float:
    """The word error rate."""
    model = tf.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    words = tf.AutoTokenizer.from_pretrained(folder)
    extractor = tf.WhisperFeatureExtractor.from_pretrained(folder)
    wrong = total = 0
    for at in range(0, len(spoken), 50):
        rows = spoken[at : at + 50]
        heard = torch.stack([Spectrum(extractor, one.samples).window(0, WINDOW_S * 100) for one in rows])
        told = words.batch_decode(model.generate(heard, return_timestamps=True), skip_special_tokens=True)
        for text, one in zip(told, rows, strict=True):
            found = errors(text, one.text)
            wrong, total = wrong + found[0], total + found[1]
    return wrong / total


@torch.no_grad()
def aligned(model: tf.WhisperForConditionalGeneration, given: torch.Tensor, spectra: torch.Tensor) -> list[list[int]]:
    """The two heads (layer, head) whose place in the sound goes forward most steadily with the text."""
    model.set_attn_implementation("eager")
    out = model.eval()(input_features=spectra, decoder_input_ids=given, output_attentions=True)
    model.set_attn_implementation("sdpa")
    steady = {}
    for layer, weights in enumerate(out.cross_attentions):
        places = weights.argmax(-1).float()  # [N, heads, T]
        order = torch.arange(places.shape[-1], dtype=torch.float32)
        for head in range(places.shape[1]):
            pairs = torch.stack([torch.corrcoef(torch.stack([row, order]))[0, 1] for row in places[:, head]])
            steady[layer, head] = float(pairs.nan_to_num(0.0).mean())
    return [list(name) for name in sorted(steady, key=lambda name: -steady[name])[:2]]


def train(a: argparse.Namespace) -> None:
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    words = tokenizer(a.seed)
    extractor = tf.WhisperFeatureExtractor(feature_size=MELS, chunk_length=WINDOW_S)
    config = config_of(words)
    model = tf.WhisperForConditionalGeneration(config).train()
    pool = say(Random(f"{a.seed}:spoken"), a.spoken)
    print(f"{len(pool)} sentences are spoken", flush=True)
    opts = loop.optimisers(model, a.lr)
    progress = loop.Progress("pico-hearing", a.steps)
    for step in range(a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps))
        spectra, given, wanted = batch(words, extractor, Random(f"{a.seed}:{step}"), a.batch, pool)
        logits = model(input_features=spectra, decoder_input_ids=given).logits
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        loop.update(model, opts)
        progress.add(step, a.batch, loss=loss.item())
    alone = [window(Random(f"aligned:{n}"), pool) for n in range(12)]
    spectra = torch.stack([Spectrum(extractor, sound).window(0, WINDOW_S * 100) for sound, _ in alone])
    rows = [target(words, said, marks=True)[:8] for _, said in alone]
    whole = [i for i, row in enumerate(rows) if len(row) == 8]
    heads = aligned(model, torch.tensor([rows[i] for i in whole]), spectra[whole])
    end, start = config.eos_token_id, config.decoder_start_token_id
    export(model, OUT, a.steps, {
        "no_timestamps_token_id": words.convert_tokens_to_ids("<|notimestamps|>"), "is_multilingual": False,
        "decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end,
        "max_length": POSITIONS, "max_initial_timestamp_index": 50, "suppress_tokens": [],
        "begin_suppress_tokens": [end],
        "prev_sot_token_id": words.convert_tokens_to_ids("<|startofprev|>"), "return_timestamps": False,
        "alignment_heads": heads,
    })  # fmt: skip
    words.save_pretrained(OUT)
    extractor.save_pretrained(OUT)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=1500)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--spoken", type=int, default=3000, help="sentences that are spoken for training")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=9)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--score", action="store_true", help="only score what is there, and write its card")
    a = p.parse_args()
    if not a.score:
        train(a)
    count, rng = 250, Random("score")
    figures = {
        "heard": score(OUT, say(rng, count, held_out=True)),
        "unheard": score(OUT, say(rng, count, held_out=True, unheard=True)),
    }
    print(figures, flush=True)
    said = {"params": parameters(OUT), "seed": a.seed, "steps": trained_steps(OUT), "batch": a.batch, "count": count}
    put_card(OUT, CARD.format(**said, **figures))


if __name__ == "__main__":
    main()
