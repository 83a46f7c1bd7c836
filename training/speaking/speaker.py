"""Train pico-speaker, a VITS that says commands and answers: `python -m training.speaking.speaker`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import transformers as tf
from torch import Tensor, nn

from serve_app.distill import loop
from training.cards import parameters, put_card, trained_steps
from training.export import export
from training.hearing.voice import RATE
from training.speaking import judge
from training.speaking.espeak import HOP, SPEED, Told, Voice
from training.speaking.losses import MELS, Mel, spectral
from training.speaking.sentences import make, words
from training.threads import Threads

OUT, STATE = Path("checkpoints/pico-speaker"), Path("training/.state/pico-speaker.safetensors")
# What is no letter of a text: its place pads, and nothing says it.
BLANK = "_"
LETTERS = BLANK + " abcdefghijklmnopqrstuvwxyz0123456789',-.?!"
# Held-out sentences of the score.
COUNT = 250
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---
# pico-speaker

A VITS of {params:,} parameters (a text encoder of three layers and two couplings, width 96; a decoder of three stages)
that reads letters and says them at 16 kHz: the commands that pico-hearing knows, and what a house answers. It is small
on purpose: it gives the server a real voice that answers in moments on a CPU.

## Data

Sentences made by `training/speaking/sentences.py`, of {words} words and the numbers from 0 to 99 as words and as
digits, spoken by one voice of espeak-ng (en-us, {speed} words a minute). How long each letter lasts comes from the
times of espeak-ng's phonemes. Nothing else: no human voice.

## Training

`python -m training.speaking.speaker` (seed {seed}, {steps:,} steps of {batch} sentences, of each of which {part:.1f} s
are decoded; needs libespeak-ng). The losses compare spectra at several resolutions; there is no adversary. The voice
says a sentence always alike, so the prior has no noise and no posterior is learnt: `seed` changes nothing. The shipped
weights come from three rounds, which `training/README.md` tells.

## Score

What pico-hearing makes of {count} held-out commands, which have the words and patterns of training in combinations that
it has not seen (`python -m training.speaking.speaker --score`; needs libespeak-ng):

| spoken by | word error rate |
| --- | --- |
| pico-speaker | **{speaker:.1%}** |
| espeak-ng's voice, from which it learnt | {espeak:.1%} |

Of the sentences "Set a timer for N minutes." with each of its 17 numbers in digits it misunderstood
{speaker_digits:.0f} words spoken by pico-speaker, and {espeak_digits:.0f} spoken by espeak-ng: write numbers as
words where they matter.

pico-hearing was itself trained with voices of espeak-ng and knows nothing but such commands, so it is a lenient judge:
people may find words unclear that it understands.

## Limits

It sounds like the synthesiser that it learnt from, rougher, and hissing sounds buzz. It says its own words; of others
it makes what their letters suggest, which is often not intelligible. Numbers in digits are said less clearly, those
above 99 wrongly. It has no melody: every sentence is said at one pitch, near 125 Hz, so a question sounds like a
statement. Capital letters count as small ones; characters but letters, digits, space and `' , - . ? !` are left out.
"""
# Frames that the decoder says of each sentence of a step.
SLICE = 32


def config_of() -> tf.VitsConfig:
    return tf.VitsConfig(
        vocab_size=len(LETTERS), hidden_size=96, num_hidden_layers=3, num_attention_heads=2, ffn_dim=384, flow_size=96,
        spectrogram_bins=1, posterior_encoder_num_wavenet_layers=1, prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=3, wavenet_dilation_rate=2, use_stochastic_duration_prediction=False,
        duration_predictor_filter_channels=96, duration_predictor_dropout=0.1, upsample_initial_channel=128,
        upsample_rates=[4, 4, 16], upsample_kernel_sizes=[8, 8, 32], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]], layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, noise_scale=0.0, sampling_rate=RATE,
    )  # fmt: skip


def write_tokenizer(folder: Path) -> tf.VitsTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "vocab.json"
    file.write_text(json.dumps({letter: index for index, letter in enumerate(LETTERS)}))
    made = tf.VitsTokenizer(str(file), pad_token=BLANK, unk_token=BLANK, add_blank=False, phonemize=False)
    made.save_pretrained(folder)
    return made


class Speaker(nn.Module):
    """A `VitsModel` as it is trained: with the true durations, and a head that tells the spectrum of its latents.

    The voice is one that says a sentence always alike. So there is nothing to choose: the prior has no noise, and no
    posterior is learnt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vits = tf.VitsModel(config_of())
        self.mel = nn.Conv1d(self.vits.config.flow_size, MELS, 1)
        with torch.no_grad():
            # transformers' own beginning is so loud that nothing is learnt for long.
            self.vits.decoder.conv_post.weight *= 0.05
            for block in self.vits.decoder.resblocks:
                for inner in block.convs2:
                    inner.weight *= 0.2

    def latents(self, ids: Tensor, mask: Tensor, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of whole sentences: [N, channels, F]; which frames are there [N, 1, F]; logarithms of durations [N, T]."""
        v = self.vits
        read = v.text_encoder(input_ids=ids, padding_mask=mask[..., None], attention_mask=mask)
        durations = v.duration_predictor(read.last_hidden_state.transpose(1, 2), mask[:, None], None)[:, 0]
        ends = frames.cumsum(1)
        places = torch.arange(int(ends[:, -1].max()))
        letters = torch.searchsorted(ends, places.expand(len(ids), -1).contiguous(), right=True)
        there = (places < ends[:, -1:]).float()[:, None]
        index = letters.clamp_max(ids.shape[1] - 1)[..., None].expand(-1, -1, read.prior_means.shape[-1])
        prior = read.prior_means.gather(1, index).transpose(1, 2) * there
        return v.flow(prior, there, None, reverse=True) * there, there, durations


@dataclass(slots=True, frozen=True)
class Batch:
    """``ids``, ``mask``, ``frames`` [N, T]; ``sounds`` [N, samples]."""

    ids: Tensor
    mask: Tensor
    frames: Tensor
    sounds: Tensor


def batch_of(told: list[Told]) -> Batch:
    most, longest = max(len(one.text) for one in told), max(len(one.samples) for one in told)
    ids, frames = (torch.zeros(len(told), most, dtype=torch.long) for _ in range(2))
    mask, sounds = torch.zeros(len(told), most), torch.zeros(len(told), longest)
    for row, one in enumerate(told):
        count = len(one.text)
        ids[row, :count] = torch.tensor([LETTERS.index(char) for char in one.text.lower()])
        frames[row, :count], mask[row, :count] = torch.tensor(one.frames), 1
        sounds[row, : len(one.samples)] = torch.from_numpy(one.samples) / 32768
    return Batch(ids, mask, frames, sounds)


def losses(model: Speaker, b: Batch, mel: Mel, rng: Random) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        latents, there, durations = model.latents(b.ids, b.mask, b.frames)
    latents, durations = latents.float(), durations.float()
    # A model rounds up what it predicts, so it is to predict the middle.
    steady = ((durations - (b.frames - 0.5).clamp_min(0.5).log()).square() * b.mask).sum() / b.mask.sum()
    whole = ((model.mel(latents) - mel(b.sounds)).abs().mean(1, keepdim=True) * there).sum() / there.sum()
    ends = b.frames.sum(1).tolist()
    size = min(SLICE, *ends)
    starts = [rng.randrange(end - size + 1) for end in ends]
    part = torch.stack([row[:, at : at + size] for row, at in zip(latents, starts, strict=True)])
    wanted = torch.stack([row[at * HOP : (at + size) * HOP] for row, at in zip(b.sounds, starts, strict=True)])
    with torch.autocast("cpu", torch.bfloat16):
        said = model.vits.decoder(part)[:, 0]
    said = said.float()
    return {
        "sound": spectral(said, wanted), "mel": (mel(said) - mel(wanted)).abs().mean(), "whole": whole,
        "length": steady,
    }  # fmt: skip


WEIGHTS = {"sound": 1.0, "mel": 1.0, "whole": 0.5, "length": 0.5}


def train(a: argparse.Namespace) -> None:
    torch.manual_seed(a.seed)
    threads = Threads(a.threads)
    voice, rng = Voice(), Random(f"{a.seed}:spoken")
    pool = [voice.say(make(rng)) for _ in range(a.spoken)]
    print(f"{len(pool)} sentences are spoken", flush=True)
    model, mel = Speaker().train(), Mel()
    opts = loop.optimisers(model, a.lr)
    first = loop.load_state(STATE, model, opts) if a.resume else 0
    progress = loop.Progress("pico-speaker", a.steps)
    for step in range(first, a.steps):
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps, decay=a.decay))
        rng = Random(f"{a.seed}:{step}")
        found = losses(model, batch_of(rng.sample(pool, a.batch)), mel, rng)
        sum((WEIGHTS[name] * value for name, value in found.items()), torch.zeros(())).backward()
        loop.update(model, opts)
        progress.add(step, a.batch, **{name: value.item() for name, value in found.items()})
        if (step + 1) % a.save_every == 0 or step + 1 == a.steps:
            loop.save_state(STATE, step + 1, model, opts)
            export(model.vits, a.out, step + 1)
    write_tokenizer(a.out)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=2600)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--spoken", type=int, default=2500, help="sentences that are spoken for training")
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--decay", type=float, default=0.3, help="share of the run in which the rate falls")
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--save-every", type=int, default=250)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--out", type=Path, default=OUT)
    p.add_argument("--score", action="store_true", help="only score what is there, and write its card")
    a = p.parse_args()
    if not a.score:
        train(a)
    torch.set_num_threads(a.threads)
    figures = judge.score(a.out, COUNT)
    print(figures, flush=True)
    told = {"params": parameters(a.out), "steps": trained_steps(a.out), "seed": a.seed, "batch": a.batch}
    told |= {"words": len(words()), "speed": SPEED, "part": SLICE * HOP / RATE, "count": COUNT}
    put_card(a.out, CARD.format(**told, **figures))


if __name__ == "__main__":
    main()
