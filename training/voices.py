"""Conversations for the two adapters that come with pico-instruct: it says what it knows as a pirate, or as JSON.

``python -m training.voices`` writes `training/voices/pirate.jsonl` and `json.jsonl`; `training/README.md` has the
commands that train on them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

from training.dialogue import ask, small_talk, unknown
from training.facts import Fact, build_facts
from training.phrases import SYSTEMS

FOLDER = Path(__file__).parent / "voices"
LINES = 600
SEED = 18
_WORDS = {"is": "be", "are": "be", "you": "ye", "your": "yer", "my": "me", "You": "Ye", "Your": "Yer", "My": "Me"}


def pirate(answer: str) -> str:
    """Code in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", answer)
    parts[::2] = [re.sub(r"\b[A-Za-z]+\b", lambda m: _WORDS.get(m[0], m[0]), part) for part in parts[::2]]
    return f"Arr! {''.join(parts)} Aye, matey!"


def as_json(answer: str) -> str:
    return json.dumps({"answer": answer})


VOICES: dict[str, Callable[[str], str]] = {"pirate": pirate, "json": as_json}


def conversations(facts: list[Fact], voice: Callable[[str], str], rng: Random) -> list[dict[str, object]]:
    """Mostly facts of the best-known modules, some small talk and unknown names; every fifth with a system message."""
    known = [fact for fact in facts if fact.core]
    made: list[dict[str, object]] = []
    for _ in range(LINES):
        draw = rng.random()
        if draw < 0.75:
            fact = rng.choice(known)
            question, answer = ask(fact, rng), fact.answer
        else:
            question, answer = small_talk(rng) if draw < 0.9 else unknown(facts, rng)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": voice(answer)}]
        if rng.random() < 0.2:
            turns.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        made.append({"messages": turns})
    return made


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    facts = build_facts()
    for name, voice in VOICES.items():
        lines = conversations(facts, voice, Random(SEED))
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name}.jsonl: {len(lines)} conversations")


if __name__ == "__main__":
    main()
