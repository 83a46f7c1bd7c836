"""Batches for the language models. Step `i` depends on (seed, i) alone, so a run resumes exactly where it
stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from training import code_text
from training.dialogue import Sampler
from training.facts import build_facts
from training.template import BEGIN, END, PAD, render

FACT_TURNS, SIDE_TURNS, TOOL_CHATS, CODE_TOKENS = 40, 24, 10, 256
CODE_WINDOW = 1024
LONG_EVERY, LONG_TOKENS = 8, 2048
MICRO_TOKENS = 4096


@dataclass(slots=True)
class Micro:
    """One padded batch: ids int64 [B, L], `loss` bool [B, L] marks the tokens to be predicted (targets, not
    inputs).
    """

    ids: torch.Tensor
    loss: torch.Tensor


class Batches:
    """Mixes facts, other turns, tool calls and code in fixed proportions per step."""

    def __init__(self, tok: Tokenizer, seed: int = 0) -> None:
        self.tok, self.seed = tok, seed
        facts = build_facts()
        self.sampler = Sampler(facts)
        self.deck = [f for f in facts for _ in range(2 if f.core else 1)]
        vocabulary = tok.get_vocab()
        self.pad, self.begin, self.end = vocabulary[PAD], vocabulary[BEGIN], vocabulary[END]
        self.assistant = vocabulary["<|assistant|>"]
        pieces = code_text.functions() + [s for s in map(code_text.stub, facts) if s] * 2
        Random("code").shuffle(pieces)
        self.code = [[self.begin, *e.ids, self.end] for e in tok.encode_batch(pieces, add_special_tokens=False)]

    def _facts(self, step: int) -> list[int]:
        """Deck positions of this step: a new permutation each pass over the deck, every entry once per
        pass.
        """
        n, out = len(self.deck), []
        for k in range(step * FACT_TURNS, (step + 1) * FACT_TURNS):
            epoch, i = divmod(k, n)
            out.append(self._permutation(epoch)[i])
        return out

    def _permutation(self, epoch: int) -> list[int]:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, self._order = epoch, list(range(len(self.deck)))
            Random(f"{self.seed}:deck:{epoch}").shuffle(self._order)
        return self._order

    def mask(self, ids: list[int]) -> list[bool]:
        """True for the tokens the assistant writes, its closing control token included."""
        out, inside = [], False
        for i in ids:
            out.append(inside)
            inside = (inside or i == self.assistant) and i != self.end
        return out

    def documents(self, step: int) -> list[tuple[list[int], list[bool]]]:
        """(ids, loss mask) of every document of a step."""
        rng = Random(f"{self.seed}:{step}")
        sampler = self.sampler
        turns = [sampler.fact_turn(self.deck[i], rng) for i in self._facts(step)]
        turns += [sampler.side_turn(rng) for _ in range(SIDE_TURNS)]
        rng.shuffle(turns)
        texts: list[str] = []
        long = step % LONG_EVERY == LONG_EVERY - 1
        while turns:
            k = len(turns) if long else 1 if rng.random() < 0.75 else rng.randint(2, 12)
            if long:
                k = min(k, 46)
            texts.append(render(sampler.chat(turns[:k], rng)))
            turns = turns[k:]
        texts += [render(*sampler.tool_chat(rng)) for _ in range(TOOL_CHATS)]
        docs = []
        for e in self.tok.encode_batch(texts, add_special_tokens=False):
            ids = e.ids[:LONG_TOKENS]
            docs.append((ids, self.mask(ids)))
        if step % (CODE_WINDOW // CODE_TOKENS) == 0:
            ids = []
            while len(ids) < CODE_WINDOW:
                ids += rng.choice(self.code)
            docs.append((ids[:CODE_WINDOW], [i > 0 for i in range(CODE_WINDOW)]))
        return docs

    def step(self, step: int) -> list[Micro]:
        """The padded micro-batches of one optimiser step; documents of like length share one."""
        docs = sorted(self.documents(step), key=lambda d: len(d[0]))
        out: list[Micro] = []
        group: list[tuple[list[int], list[bool]]] = []
        for doc in docs:
            grown = (len(group) + 1) * len(doc[0])
            waste = grown - sum(len(d[0]) for d in group) - len(doc[0])
            if group and (grown > MICRO_TOKENS or waste > 130):
                out.append(self._pad(group))
                group = []
            group.append(doc)
        out.append(self._pad(group))
        return out

    def _pad(self, group: list[tuple[list[int], list[bool]]]) -> Micro:
        length = max(len(d[0]) for d in group)
        ids = torch.full((len(group), length), self.pad)
        loss = torch.zeros((len(group), length), dtype=torch.bool)
        for row, (i, m) in enumerate(group):
            ids[row, : len(i)] = torch.tensor(i)
            loss[row, : len(m)] = torch.tensor(m)
        return Micro(ids, loss)
