"""Chats: questions about facts in many phrasings, small talk, names the model cannot know, tools, longer
talks.
"""

from __future__ import annotations

from random import Random
from typing import Any

from training import toolcalls
from training.curated import HOWTO, SMALL_TALK
from training.facts import Fact
from training.phrases import ASK, ASK_IN, ASK_MODULE, CLOSERS, DONT_KNOW, OPENERS, REVERSE, SYSTEMS

FOREIGN = (
    "numpy.array", "pandas.DataFrame", "requests.get", "torch.nn.Linear", "flask.Flask", "django.db",
    "numpy", "pandas", "tensorflow", "scipy.optimize", "matplotlib.pyplot", "sklearn.svm",
    "fastapi.FastAPI", "pydantic.BaseModel", "torch", "requests", "flask", "django", "numpy.zeros",
    "pandas.read_csv", "beautifulsoup4", "seaborn", "keras.Model", "celery", "sqlalchemy",
    "pytest.fixture", "click.command", "aiohttp", "httpx.get",
)  # fmt: skip
VERB_START = (
    "returns", "creates", "makes", "computes", "removes", "converts", "splits", "joins", "adds",
    "tests", "reads", "writes", "opens", "finds", "copies", "moves", "deletes", "generates", "runs",
    "waits", "encodes", "decodes", "parses", "sorts", "inserts", "replaces", "turns", "suspends",
    "sets", "gets", "deserializes", "serializes", "serialises", "starts", "yields", "shuffles", "scans",
    "applies",
)  # fmt: skip


def kind_word(fact: Fact, rng: Random) -> str:
    if fact.kind == "function" and rng.random() < 0.3:
        return "Python function"
    return {"keyword": "name"}.get(fact.kind, fact.kind)


def ask(fact: Fact, rng: Random) -> str:
    """A question about a fact."""
    if fact.kind == "module" and rng.random() < 0.75:
        return rng.choice(ASK_MODULE).format(n=fact.name)
    head, _, last = fact.name.rpartition(".")
    if fact.kind in ("function", "class") and head and rng.random() < 0.07:
        return rng.choice(ASK_IN).format(s=last, m=head)
    name = fact.name
    if fact.kind in ("function", "method") and rng.random() < 0.12:
        name += "()"
    question = rng.choice(ASK).format(n=name, k=kind_word(fact, rng))
    if rng.random() < 0.25:
        question = f"{rng.choice(OPENERS)} {question}"
    if rng.random() < 0.12:
        question = f"{question} {rng.choice(CLOSERS)}"
    return question


def copying(rng: Random) -> tuple[str, str]:
    """A turn whose answer repeats made-up words and numbers of the question: trains the copying that calls need."""
    parts = [
        toolcalls.word(rng) if rng.random() < 0.6 else str(rng.randint(0, 99999)) for _ in range(rng.randint(1, 4))
    ]
    text = " ".join(p.capitalize() if rng.random() < 0.2 else p for p in parts)
    template = rng.choice(
        ("Repeat: {t}", "Say {t}", "Repeat after me: {t}", "Echo '{t}'", 'Write "{t}".', "Copy this: {t}")
    )
    return template.format(t=text), text


def reversible(fact: Fact) -> bool:
    """Whether the description is short and clear enough to ask for the name."""
    return fact.kind in ("function", "method") and fact.tail.split(" ")[0] in VERB_START and 24 <= len(fact.tail) <= 110


def reverse(fact: Fact, rng: Random) -> str:
    """A question that describes the fact and asks for its name."""
    module = fact.name.rpartition(".")[0] or "builtins"
    return rng.choice(REVERSE).format(k=fact.kind, m=module, d=fact.tail.rstrip("."))


def unknown(facts: list[Fact], rng: Random) -> tuple[str, str]:
    """A question about a name that does not exist here, with the honest answer."""
    style = rng.random()
    if style < 0.25:
        name = rng.choice(FOREIGN)
    elif style < 0.55:
        name = f"{rng.choice(facts).module}.{toolcalls.word(rng)}"
    elif style < 0.8:
        name = f"{toolcalls.word(rng)}.{toolcalls.word(rng)}"
    else:
        name = toolcalls.word(rng)
    template = rng.choice([a for a in ASK if a != "{n}"])
    return template.format(n=name, k=rng.choice(("function", "class", "module"))), DONT_KNOW.format(n=name)


def small_talk(rng: Random) -> tuple[str, str]:
    pool = HOWTO if rng.random() < 0.62 else SMALL_TALK
    question, answer = rng.choice(pool)
    style = rng.random()
    if style < 0.15:
        question = question[0].lower() + question[1:].rstrip("?.!")
    elif style < 0.25 and question.startswith("How do I"):
        question = (
            question.replace(
                "How do I", rng.choice(("How can I", "How to", "What is the best way to", "How would you"))
            ).rstrip("?")
            + "?"
        )
    return question, answer


class Sampler:
    """Draws conversations. Every draw depends on the generator passed in alone."""

    def __init__(self, facts: list[Fact]) -> None:
        self.facts = facts
        seen: dict[str, int] = {}
        for f in facts:
            seen[f.tail] = seen.get(f.tail, 0) + 1
        self.reversible = [f for f in facts if reversible(f) and f.core and seen[f.tail] == 1]

    def side_turn(self, rng: Random) -> tuple[str, str]:
        """A turn that is not a plain question about a fact."""
        style = rng.random()
        if style < 0.15:
            return copying(rng)
        if style < 0.45:
            fact = rng.choice(self.reversible)
            return reverse(fact, rng), fact.answer
        if style < 0.68:
            return unknown(self.facts, rng)
        return small_talk(rng)

    def fact_turn(self, fact: Fact, rng: Random) -> tuple[str, str]:
        return ask(fact, rng), fact.answer

    def chat(self, turns: list[tuple[str, str]], rng: Random) -> list[dict[str, Any]]:
        """Messages of a conversation, every third with a system message."""
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages

    def tool_chat(self, rng: Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        fact = rng.choice(self.facts)
        other = self.fact_turn(fact, rng) if rng.random() < 0.6 else self.side_turn(rng)
        return toolcalls.sample(rng, other)
