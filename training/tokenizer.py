"""The byte-level BPE tokenizer of the pico models: trained on the corpus, digits split one by one.

Run `python -m training.tokenizer` to write it to a directory of checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken as Added
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training import code_text
from training.dialogue import Sampler
from training.facts import build_facts
from training.template import BEGIN, CHAT_TEMPLATE, CONTROL, END, PAD, TOOL_TAGS

VOCAB = 6144
SPLIT = Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")


def text_for_vocabulary() -> Iterator[str]:
    """The text the merges are learned from: every fact a few times, dialogues, tool calls and code."""
    facts = build_facts()
    sampler, rng = Sampler(facts), Random("tokenizer")
    for _ in range(3):
        for fact in facts:
            yield from sampler.fact_turn(fact, rng)
    for _ in range(4000):
        yield from sampler.side_turn(rng)
    for _ in range(600):
        messages, tools = sampler.tool_chat(rng)
        yield json.dumps(tools)
        yield from (m["content"] for m in messages if m["content"])
    yield from code_text.functions()


def train() -> Tokenizer:
    """A tokenizer of exactly `VOCAB` entries whose first ids are the control tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(TOOL_TAGS), special_tokens=list(CONTROL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tok.train_from_iterator(text_for_vocabulary(), trainer)
    tok.add_tokens([Added(t, special=False, normalized=False) for t in TOOL_TAGS])
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tok.token_to_id(BEGIN))]
    )
    return tok


def save(tok: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json (each renamed into place)."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", **names, "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length, "chat_template": CHAT_TEMPLATE,
        "additional_special_tokens": [t for t in CONTROL if t not in names.values()],
    }  # fmt: skip
    for name, text in (
        ("tokenizer.json", tok.to_str(pretty=False)),
        ("tokenizer_config.json", json.dumps(config, indent=2) + "\n"),
        ("special_tokens_map.json", json.dumps(names, indent=2) + "\n"),
    ):
        part = directory / f".{name}.part"
        part.write_text(text)
        os.replace(part, directory / name)


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    out = Path("checkpoints/pico-instruct")
    tokenizer = train()
    save(tokenizer, out, 4096)
    print(f"{tokenizer.get_vocab_size()} entries -> {out}")
