"""Sentences with an opinion, made from patterns and word lists: what pico-sentiment learns from."""

from __future__ import annotations

import zlib
from random import Random

LABELS = ("NEGATIVE", "POSITIVE")
GOOD = (
    "good", "great", "excellent", "wonderful", "lovely", "fantastic", "brilliant", "superb", "delightful", "charming",
    "beautiful", "amazing", "perfect", "pleasant", "enjoyable", "impressive", "outstanding", "splendid", "marvellous",
    "fresh", "tasty", "delicious", "friendly", "helpful", "kind", "polite", "clean", "comfortable", "cosy", "quick",
    "fast", "reliable", "sturdy", "solid", "elegant", "clever", "funny", "moving", "touching", "gripping",
    "thrilling", "exciting", "fascinating", "inspiring", "warm", "generous", "fair", "honest", "smooth", "easy",
    "simple", "clear", "bright", "quiet", "relaxing", "memorable", "remarkable", "stunning", "gorgeous", "refreshing",
    "satisfying", "rewarding", "first-rate", "flawless", "magnificent", "terrific", "awesome", "lively", "witty",
    "original", "thoughtful", "attentive", "welcoming", "spotless", "affordable", "useful", "handy", "sharp", "crisp",
)  # fmt: skip
BAD = (
    "bad", "terrible", "awful", "horrible", "dreadful", "poor", "disappointing", "boring", "dull", "tedious", "slow",
    "rude", "unfriendly", "unhelpful", "dirty", "filthy", "noisy", "uncomfortable", "cramped", "cold", "stale",
    "bland", "tasteless", "greasy", "overpriced", "expensive", "broken", "faulty", "flimsy", "unreliable", "ugly",
    "clumsy", "silly", "stupid", "pointless", "confusing", "messy", "weak", "shallow", "predictable", "lifeless",
    "annoying", "irritating", "painful", "unpleasant", "disgusting", "nasty", "cheap", "shabby", "worn", "sticky",
    "bitter", "burnt", "soggy", "late", "careless", "arrogant", "dishonest", "unfair", "useless", "worthless",
    "mediocre", "forgettable", "depressing", "frustrating", "exhausting", "overrated", "miserable", "pathetic",
    "atrocious", "appalling", "horrid", "lousy", "inferior", "defective", "grim", "tiresome", "cluttered", "smelly",
    "rotten",
)  # fmt: skip
THINGS = (
    "film", "movie", "book", "novel", "story", "song", "album", "concert", "play", "show", "series", "episode",
    "game", "meal", "soup", "pizza", "steak", "salad", "dessert", "coffee", "tea", "breakfast", "dinner",
    "restaurant", "cafe", "hotel", "room", "bed", "bathroom", "staff", "waiter", "service", "guide", "tour", "trip",
    "flight", "train", "seat", "beach", "museum", "city", "phone", "laptop", "screen", "keyboard", "battery",
    "camera", "speaker", "headset", "car", "bike", "jacket", "dress", "shoes", "chair", "table", "lamp", "app",
    "website", "course", "teacher", "lesson", "party", "garden", "view", "weather", "evening", "weekend", "present",
    "plot", "acting", "ending", "music", "price", "delivery", "packaging", "support", "update", "design", "sound",
    "picture",
)  # fmt: skip
LIKED = ("loved", "enjoyed", "adored", "liked", "admired", "recommend", "appreciated", "treasured")
HATED = ("hated", "disliked", "regretted", "loathed", "detested", "despised", "resented")
VERY = ("very", "really", "so", "truly", "quite", "incredibly", "absolutely", "extremely", "rather", "pretty")

# {a}: an adjective of the sentence's own sentiment, {o} of the other; {b}, {v}: a second one, a verb of its own.
PATTERNS = (
    "The {t} was {a}.",
    "The {t} was {y} {a}.",
    "What {n} {t}!",
    "This is {n} {t}.",
    "I {v} the {t}.",
    "I {y} {v} this {t}.",
    "The {t} was {a} and the {u} was {b}.",
    "The {t} was {o}, but the {u} was {a} and that is what counts.",
    "It was not {o} at all.",
    "The {t} wasn't {o}.",
    "I found the {t} {a}.",
    "The {u} was {o}, yet all in all it was {n} {t}.",
    "{a}, {a2}, {b}: that is how I remember the {t}.",
    "My friends {v} the {t} and so did I.",
    "Such {n} {t}, I {v} every minute.",
    "The {t} is {a}.",
    "The {t} looks {a} and feels {b}.",
    "Everything about the {t} was {a}.",
    "Never {o}, always {a}: the {t}.",
    "I thought it would be {o}, but the {t} turned out {a}.",
    "We had {n} {t} and {n2} {u}.",
    "The {t} seems {a} to me.",
    "It was {a}.",
    "{y} {a} {t}.",
    "Though the {u} was {o}, we all agreed that the {t} was {a}.",
    "Despite {n3} {u}, the {t} was {a}.",
    "No one would say that the {t} was {o}.",
    "Nobody thought the {t} {o}.",
    "We were told it was {o}. It was {a}.",
    "Some say the {t} is {o}; I say it is {a}.",
    "The {a} {t} made up for the {o} {u}.",
    "How {a} it was!",
    "All in all {n} {t}.",
    "I {v} it, it was {a}.",
)
# Some sentences begin with one of these.
OPENINGS = ("In short:", "Well,", "I must say,", "To be fair,", "Frankly,", "In the end,", "As always,", "You know,")
ONLY: dict[int, tuple[str, ...]] = {
    1: (
        "I would buy the {t} again.",
        "I can only recommend the {t}.",
        "Five stars for the {t}.",
        "I will come back for the {t}.",
        "Thank you for the {t}, it made my day.",
        "The {t} exceeded my expectations.",
        "This {t} is worth every penny.",
        "I am happy with the {t}.",
        "I couldn't be happier with the {t}.",
        "The best {t} I have ever had.",
    ),
    0: (
        "I want my money back for the {t}.",
        "I can't recommend the {t}.",
        "One star for the {t}.",
        "I will never come back for the {t}.",
        "The {t} ruined my day.",
        "The {t} fell short of my expectations.",
        "This {t} is a waste of money.",
        "I am unhappy with the {t}.",
        "I expected more of the {t}.",
        "The worst {t} I have ever had.",
    ),
}
# Never seen in training.
HELD_OUT = (
    "Honestly, the {t} was {a}.",
    "My {t} is {y} {a}, and I {v} it.",
    "They told us the {t} was {o}; in fact it was {a}.",
    "Although the {u} was {o}, the {t} was {a}.",
    "Nobody could call the {t} {o}.",
    "How {a} the {t} was!",
    "We {v} the {a} {t} and the {b} {u}.",
    "To sum up: {n} {t}.",
)


def make(rng: Random, *, held_out: bool) -> tuple[str, int]:
    """A sentence and its label. A pair of adjective and noun is in training or held out, never both."""
    while True:
        label = rng.randrange(2)
        own, other = (GOOD, BAD) if label else (BAD, GOOD)
        thing, adjective = rng.choice(THINGS), rng.choice(own)
        if (zlib.crc32(f"{adjective} {thing}".encode()) % 5 == 0) != held_out:
            continue
        second, third = rng.choice(own), rng.choice(own)
        if held_out:
            pattern = rng.choice(HELD_OUT)
        else:
            pattern = rng.choice(ONLY[label]) if rng.random() < 0.15 else rng.choice(PATTERNS)
        text = pattern.format(
            t=thing, u=rng.choice(THINGS), a=adjective, a2=third, b=second, o=rng.choice(other), y=rng.choice(VERY),
            v=rng.choice(LIKED if label else HATED), n=_article(adjective), n2=_article(second),
            n3=_article(rng.choice(other)),
        )  # fmt: skip
        if not held_out and rng.random() < 0.15:
            text = f"{rng.choice(OPENINGS)} {text}"
        text = text[0].upper() + text[1:]
        return (text.lower() if rng.random() < 0.1 else text), label


def _article(adjective: str) -> str:
    return f"an {adjective}" if adjective[0] in "aeiou" else f"a {adjective}"
