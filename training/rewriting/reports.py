"""Short reports of accidents, with a sentence that says it all; one in eight of these is held out of training."""

from __future__ import annotations

from random import Random
from zlib import crc32

EVENTS = ("fire", "flood", "power cut", "traffic accident", "storm", "gas leak")
TOWNS = (
    "Lindau",
    "Marsfield",
    "Port Elva",
    "Oakham",
    "Brunnen",
    "Silverton",
    "Kestrel Bay",
    "Norwood",
    "Altdorf",
    "Rivermouth",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty")
CAUSES = {
    "fire": ("a broken cable", "a candle", "an old stove"),
    "flood": ("heavy rain", "a burst dam", "melting snow"),
    "power cut": ("a fallen tree", "a broken transformer", "heavy snow"),
    "traffic accident": ("black ice", "fog", "a worn tyre"),
    "storm": ("a cold front", "warm air from the south"),
    "gas leak": ("a rusty pipe", "road works"),
}
HARM = ("were hurt", "had to leave their homes", "are missing", "were taken to hospital")
OPENINGS = (
    "There was a {event} in {town} on {day}.",
    "On {day} a {event} struck {town}.",
    "People in {town} will remember {day} for a long time: there was a {event}.",
    "A {event} surprised the people of {town} on {day}.",
)
HARMED = (
    "{number} people {harm}.",
    "According to the police {number} people {harm}.",
    "The mayor said that {number} people {harm}.",
)
BECAUSE = (
    "The cause was {cause}.",
    "Experts say that {cause} was to blame.",
    "It is now known that {cause} was the cause.",
)
ASIDE = (
    "The weather was mild for the season.", "The town is known for its old bridge.", "Traffic was heavy all morning.",
    "Neighbours brought tea and blankets.", "A concert in the town hall was put off.", "The library stayed open.",
    "Schools will be open again next week.", "Many people took photographs.", "The market was moved to another street.",
    "Dogs and cats were looked after by volunteers.", "The local radio played music all night.",
    "The football match went on as planned.",
)  # fmt: skip
SUMMARY = "{day}: a {event} in {town}, caused by {cause}; {number} people {harm}."


def is_held_out(summary: str) -> bool:
    return crc32(summary.encode()) % 8 == 0


def make(rng: Random, *, held_out: bool) -> tuple[str, str]:
    """A report and its summary."""
    while True:
        event = rng.choice(EVENTS)
        facts = {
            "event": event, "town": rng.choice(TOWNS), "day": rng.choice(DAYS), "number": rng.choice(NUMBERS),
            "harm": rng.choice(HARM), "cause": rng.choice(CAUSES[event]),
        }  # fmt: skip
        summary = SUMMARY.format(**facts)
        if is_held_out(summary) != held_out:
            continue
        rest = [rng.choice(HARMED), rng.choice(BECAUSE)]
        rng.shuffle(rest)
        said = [rng.choice(OPENINGS), *rest]
        for aside in rng.sample(ASIDE, rng.randint(1, 4)):
            said.insert(rng.randint(0, len(said)), aside)
        text = " ".join(_upper(sentence.format(**facts)) for sentence in said)
        return text, summary


def _upper(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
