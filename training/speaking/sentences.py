"""What the speaker learns to say: the commands that pico-hearing knows, and what a house answers."""

from __future__ import annotations

import re
from itertools import chain
from random import Random

from training.hearing import commands

TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
TO_NINETEEN = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
ANSWERS = (
    "The {thing} in the {room} is {state}.",
    "The {thing} is {state} now.",
    "It is {count} degrees in the {room}.",
    "The timer for {count} {unit} is set.",
    "Your timer is over.",
    "There are {count} {unit} left.",
    "The {door} is {place}.",
    "I have put {goods} on your list.",
    "I will call {name} on {day}.",
    "I will wake you at {count} on {day}.",
    "{count} {sign} {other} is {third}.",
    "{greeting}, {name}.",
    "{greeting}.",
    "Today is {day}.",
    "It is {day}, {month} {count}.",
    "It is {count} past {other}.",
    "I did not understand you, please say it again.",
    "Yes, {name} is in the {room}.",
    "No, the {door} is not {place}.",
    "Thank you, {name}.",
    "There is no {goods} on your list.",
    "Now playing {music} music.",
    "Hello {name}, how are you?",
    "{count}, {other}, {third}.",
)
WORDS = {
    **commands.SLOTS,
    "place": ("open", "closed", "locked"),
    "greeting": ("Good morning", "Good evening", "Good night", "Hello", "Welcome home", "Goodbye"),
    "month": MONTHS,
}


def words() -> set[str]:
    """All of them but numbers in digits."""
    texts = [*commands.PATTERNS, *ANSWERS, *TENS, *TO_NINETEEN, *chain.from_iterable(WORDS.values())]
    return {word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"{.*?}", "", text))}


def spelled(number: int) -> str:
    """Of 0 to 99."""
    if number < 20:
        return TO_NINETEEN[number]
    tens, ones = TENS[number // 10 - 2], number % 10
    return f"{tens}-{TO_NINETEEN[ones]}" if ones else tens


DIGITS = {spelled(number): str(number) for number in range(100)}


def count(rng: Random) -> str:
    """A number up to 99, now in words, now in digits."""
    number = rng.randrange(100)
    return spelled(number) if rng.random() < 0.5 else str(number)


def answer(rng: Random) -> str:
    words = {name: rng.choice(found) for name, found in WORDS.items()}
    text = rng.choice(ANSWERS).format(**words, count=count(rng), other=count(rng), third=count(rng))
    return text[0].upper() + text[1:]


def loosely(rng: Random, text: str) -> str:
    """As people type: now and then without the last point, or with another."""
    shape = rng.random()
    if shape < 0.12:
        return text.rstrip(".?")
    return text.rstrip(".") + "!" if shape < 0.18 else text


def in_digits(text: str) -> str:
    return re.sub("|".join(rf"\b{word}\b" for word in DIGITS), lambda found: DIGITS[found[0]], text)


def make(rng: Random) -> str:
    if rng.random() < 0.3:
        return loosely(rng, answer(rng))
    text = commands.make(rng, held_out=False)
    return loosely(rng, in_digits(text) if rng.random() < 0.5 else text)
