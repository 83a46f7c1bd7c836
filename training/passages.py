"""Questions with passages for the reranker: a docstring answers, docstrings of its neighbours distract.

Every eighth symbol (by a hash of its name) is held out: neither its passage nor its questions occur in
training.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from random import Random

from training.dialogue import kind_word
from training.facts import Fact, build_facts
from training.phrases import ASK, HELD_OUT
from training.symbols import collect
from training.toolcalls import word

WORDS = re.compile(r"[A-Za-z_]{3,}")
STOP = {
    "the", "and", "for", "that", "this", "with", "from", "are", "not", "can", "will", "its", "any",
    "all", "into", "when", "which", "one", "has", "been", "use", "used", "using",
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Passage:
    """A docstring text about one symbol; `named` starts with the symbol's name, `bare` does not."""

    name: str
    module: str
    fact: Fact
    bare: str
    named: str
    held_out: bool


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 8 == 0


def clean(doc: str, words: int = 55) -> str:
    """The beginning of a docstring as running text."""
    return " ".join(re.sub(r"\s+", " ", doc.replace("`", "")).strip().split(" ")[:words])


def build_passages() -> list[Passage]:
    docs = {s.name: s.doc for s in collect()}
    out = []
    for fact in build_facts():
        bare = clean(docs.get(fact.name, ""))
        tail = fact.tail.lstrip(": ")
        if len(bare) < 25:
            bare = tail[0].upper() + tail[1:]
        out.append(Passage(fact.name, fact.module, fact, bare, f"{fact.name}: {bare}", is_held_out(fact.name)))
    return out


def content_words(text: str) -> list[str]:
    return [w for w in WORDS.findall(text) if w.lower() not in STOP]


class Examples:
    """Draws (question, [right passage, distractors...])."""

    def __init__(self, passages: list[Passage], held_out: bool = False) -> None:
        self.all = passages
        self.pool = [p for p in passages if p.held_out == held_out]
        self.held_out = held_out
        self.by_module: dict[str, list[Passage]] = defaultdict(list)
        self.by_word: dict[str, list[Passage]] = defaultdict(list)
        for p in self.pool:
            self.by_module[p.module].append(p)
            for w in set(x.lower() for x in content_words(p.bare)):
                self.by_word[w].append(p)

    def distractors(self, right: Passage, count: int, rng: Random) -> list[Passage]:
        """Half from the same module or with a word in common, half from anywhere; none with the same text."""
        out: dict[str, Passage] = {}
        words = content_words(right.bare)
        for i in range(count * 6):
            if i % 4 == 0:
                other = rng.choice(self.by_module[right.module])
            elif i % 4 == 1 and words:
                other = rng.choice(self.by_word.get(rng.choice(words).lower()) or self.pool)
            else:
                other = rng.choice(self.pool)
            if other.name != right.name and other.bare != right.bare and other.fact.tail != right.fact.tail:
                out[other.name] = other
            if len(out) == count:
                break
        while len(out) < count:
            other = rng.choice(self.pool)
            if other.bare != right.bare:
                out[other.name] = other
        return list(out.values())

    def described(self, right: Passage, rng: Random) -> str:
        """A question that tells what the symbol does without its name."""
        tail = right.fact.tail.lstrip(": ").rstrip(".")
        style = rng.random()
        if style < 0.3:
            return rng.choice(("Which {k} {t}?", "What {t}?", "Name the {k} that {t}.")).format(
                k=kind_word(right.fact, rng), t=tail
            )
        words = content_words(tail)
        if len(words) < 2:
            return tail
        start = rng.randrange(max(1, len(words) - 3))
        some = words[start : start + rng.randint(2, 6)]
        if style < 0.5:
            rng.shuffle(some)
        return rng.choice(("How do I {w}?", "{w}", "{w} in Python", "How to {w}", "I want to {w}")).format(
            w=" ".join(some).lower()
        )

    def question(self, right: Passage, rng: Random, held_out_phrases: bool = False) -> tuple[str, bool]:
        """(question, whether it names the symbol)."""
        if rng.random() < 0.5:
            phrases = HELD_OUT if held_out_phrases else ASK
            return rng.choice(phrases).format(n=right.name, k=kind_word(right.fact, rng)), True
        return self.described(right, rng), False

    def draw(self, count: int, rng: Random) -> tuple[str, list[str]]:
        """A question and `count` + 1 passages, the right one first."""
        right = rng.choice(self.pool)
        others = self.distractors(right, count, rng)
        question, by_name = self.question(right, rng)
        if not self.held_out and rng.random() < 0.2:  # made-up names: forces comparing letters, not recall
            name = f"{word(rng)}.{word(rng)}" if rng.random() < 0.5 else word(rng)
            question = rng.choice(ASK).format(n=name, k="function")
            texts = [f"{name}: {right.bare}"] + [f"{word(rng)}.{word(rng)}: {o.bare}" for o in others]
            return question, texts
        named = by_name or rng.random() < 0.4
        return question, [p.named if named else p.bare for p in (right, *others)]
