"""Prompts for `serve-app train-draft` on pico-instruct: `python -m training.prompts FILE`.

Questions, other turns and tool conversations of the kinds it was trained on, from a seed of their own, and beginnings
of source text to complete. The phrasings in `phrases.HELD_OUT` are left out, as in all training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from training import code_text
from training.dialogue import Sampler
from training.facts import build_facts
from training.pretrain import OUT
from training.template import BEGIN

FACTS, SIDE, TOOLS, CODE = 1600, 250, 350, 150


def prompts(seed: str = "prompts") -> list[dict[str, Any]]:
    """JSON objects with `messages` (and `tools`) or `ids`, shuffled."""
    rng = Random(seed)
    facts = build_facts()
    sampler = Sampler(facts)
    asked = [sampler.fact_turn(f, rng)[0] for f in rng.sample(facts, min(FACTS, len(facts)))]
    asked += [sampler.side_turn(rng)[0] for _ in range(SIDE)]
    found: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": text}]} for text in asked]
    for _ in range(TOOLS):
        messages, tools = sampler.tool_chat(rng)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        found.append({"messages": messages[: rng.choice(turns)], "tools": tools})
    tok = Tokenizer.from_file(str(OUT / "tokenizer.json"))
    begin = tok.get_vocab()[BEGIN]
    for text in rng.sample(code_text.functions(), CODE):
        ids = tok.encode(text, add_special_tokens=False).ids
        found.append({"ids": [begin, *ids[: max(8, len(ids) // 3)]]})
    rng.shuffle(found)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(item) + "\n" for item in prompts()))
