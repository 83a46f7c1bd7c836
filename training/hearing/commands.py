"""What people say to a house, in a closed vocabulary; one sentence in eight is held out of training."""

from __future__ import annotations

from random import Random
from zlib import crc32

NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "fifteen",
    "twenty", "thirty", "forty", "fifty",
)  # fmt: skip
DIGITS = ("zero", *NUMBERS[:9])
SLOTS = {
    "thing": ("light", "radio", "heating", "fan", "lamp", "television"),
    "room": ("kitchen", "bedroom", "bathroom", "garden", "office", "hall"),
    "unit": ("minutes", "hours", "seconds"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "name": ("Anna", "Peter", "Maria", "David", "Sarah", "Thomas"),
    "music": ("jazz", "rock", "quiet", "classical", "happy"),
    "door": ("front door", "window", "garage", "gate"),
    "state": ("on", "off"),
    "sign": ("plus", "minus", "times"),
    "move": ("Open", "Close", "Lock"),
    "goods": ("milk", "bread", "apples", "coffee", "butter"),
}
PATTERNS = (
    "Turn {state} the {thing} in the {room}.",
    "Please turn the {thing} {state}.",
    "Set a timer for {number} {unit}.",
    "Call {name} on {day}.",
    "What is {number} {sign} {other}?",
    "Play {music} music in the {room}.",
    "{move} the {door}, please.",
    "Wake me at {number} on {day}.",
    "Put {goods} on my list.",
    "My number is {digits}.",
    "How warm is it in the {room}?",
    "Tell {name} to buy {goods}.",
)


def is_held_out(text: str) -> bool:
    return crc32(text.encode()) % 8 == 0


def make(rng: Random, *, held_out: bool) -> str:
    while True:
        words = {name: rng.choice(found) for name, found in SLOTS.items()}
        digits = " ".join(rng.choice(DIGITS) for _ in range(rng.randrange(3, 7)))
        text = rng.choice(PATTERNS).format(
            **words, number=rng.choice(NUMBERS), other=rng.choice(NUMBERS), digits=digits
        )
        if is_held_out(text) == held_out:
            return text
