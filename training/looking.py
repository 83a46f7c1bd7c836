"""Drawn pictures of coloured things, numbers and charts, and conversations about them: what pico-vision learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.scenes import CELLS, FINE, SHAPES, SIDE, draw_shape

COLOURS = {
    "red": (215, 40, 45), "green": (40, 165, 60), "blue": (45, 80, 220), "yellow": (245, 225, 50),
    "purple": (145, 45, 185), "orange": (245, 140, 30), "white": (245, 245, 245), "black": (15, 15, 15),
}  # fmt: skip
DIGITS = 10
MOST = 5
NOTHING_TO_SEE = "Send me a picture."
ONLY_SHAPES = "I only know drawn shapes, colours, numbers and charts."
# Of a chart's bars, in pixels: far enough apart to be told by who looks.
HEIGHTS = range(10, 52, 7)
BARS = 5
NUMBER_DIGITS = 3


@dataclass(slots=True, frozen=True)
class Seen:
    """``kind``: a shape's name, or a digit. ``box``: left, top, right, bottom in pixels."""

    kind: str
    colour: str
    cell: int
    box: tuple[float, float, float, float]

    @property
    def digit(self) -> bool:
        return self.kind.isdigit()

    @property
    def named(self) -> str:
        """With its colour, as an answer tells it."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.kind}"


def draw(rng: Random, count: int) -> tuple[Image.Image, list[Seen]]:
    """A picture of ``SIDE`` pixels with ``count`` things, in the order in which they are read."""
    picture, pen = _empty(rng)
    kinds = [*SHAPES] if rng.random() < 0.5 else rng.sample(SHAPES, 2)  # the same ones several times, for counting
    things = [_thing(rng, pen, kinds, cell) for cell in sorted(rng.sample(range(CELLS * CELLS), count))]
    return _seen(rng, picture), things


@dataclass(slots=True, frozen=True)
class View:
    """``what``: things, number or chart; ``heights`` of a chart's bars, as ``things`` has them from left to right."""

    picture: Image.Image
    things: list[Seen]
    what: str = "things"
    heights: tuple[int, ...] = ()


def view(rng: Random) -> View:
    """A picture of any kind."""
    kind = rng.random()
    if kind < 0.5:
        return View(*draw(rng, rng.randrange(1, MOST + 1)))
    return draw_number(rng) if kind < 0.8 else draw_chart(rng)


def draw_number(rng: Random) -> View:
    """A number of one colour that fills much of the picture."""
    picture, pen = _empty(rng)
    count = rng.randrange(1, NUMBER_DIGITS + 1)
    size = rng.uniform(20, {1: 46, 2: 38, 3: 28}[count])
    step, colour = size * 0.68, rng.choice([*COLOURS])
    paint = _paint(rng, colour)
    left = rng.uniform(2 + step / 2, SIDE - 2 - step * (count - 0.5))
    y = rng.uniform(2 + size / 2, SIDE - 2 - size / 2)
    things = []
    for place in range(count):
        digit, x = str(rng.randrange(DIGITS)), left + place * step
        pen.text((x * FINE, y * FINE), digit, fill=paint, font=_font(round(size * FINE)), anchor="mm")
        things.append(Seen(digit, colour, place, (x - step / 2, y - size / 2, x + step / 2, y + size / 2)))
    return View(_seen(rng, picture), things, "number")


def draw_chart(rng: Random) -> View:
    """Bars of different colours and heights on one line."""
    picture, pen = _empty(rng)
    count = rng.randrange(2, BARS + 1)
    foot, width = rng.uniform(56, 60), rng.uniform(6, 9)
    step = rng.uniform(width + 2, (SIDE - 8) / count)
    left = rng.uniform(4, SIDE - 4 - step * count)
    things, heights = [], tuple(rng.sample(HEIGHTS, count))
    for place, (colour, height) in enumerate(zip(rng.sample([*COLOURS], count), heights, strict=True)):
        x = left + place * step + (step - width) / 2
        box = (x, foot - height + rng.uniform(-1, 1), x + width, foot)
        pen.rectangle([edge * FINE for edge in box], fill=_paint(rng, colour))
        things.append(Seen("bar", colour, place, box))
    pen.line([left * FINE, foot * FINE, (left + step * count) * FINE, foot * FINE], fill=(60, 60, 60), width=FINE)
    return View(_seen(rng, picture), things, "chart", heights)


def _empty(rng: Random) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    level = rng.randrange(105, 175)
    ground = tuple(level + rng.randrange(-8, 9) for _ in range(3))
    picture = Image.new("RGB", (SIDE * FINE, SIDE * FINE), ground)
    return picture, ImageDraw.Draw(picture)


def _seen(rng: Random, picture: Image.Image) -> Image.Image:
    """As large as pictures are, with noise."""
    small = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 8), (SIDE, SIDE, 3))
    return Image.fromarray(np.clip(np.asarray(small) + noise, 0, 255).astype(np.uint8))


def _paint(rng: Random, colour: str) -> tuple[int, int, int]:
    r, g, b = (min(255, max(0, value + rng.randrange(-12, 13))) for value in COLOURS[colour])
    return r, g, b


def _thing(rng: Random, pen: ImageDraw.ImageDraw, kinds: list[str], cell: int) -> Seen:
    side = SIDE / CELLS
    size, colour = rng.uniform(14, 20), rng.choice([*COLOURS])
    slack = (side - size) / 2
    x = (cell % CELLS + 0.5) * side + rng.uniform(-slack, slack)
    y = (cell // CELLS + 0.5) * side + rng.uniform(-slack, slack)
    paint = _paint(rng, colour)
    if rng.random() < 0.2:
        kind = str(rng.randrange(DIGITS))
        pen.text((x * FINE, y * FINE), kind, fill=paint, font=_font(round(size * FINE)), anchor="mm")
    else:
        kind = rng.choice(kinds)
        draw_shape(pen, SHAPES.index(kind), x, y, size, paint, 0.0)
    return Seen(kind, colour, cell, (x - size / 2, y - size / 2, x + size / 2, y + size / 2))


def _font(size: int) -> ImageFont.FreeTypeFont:
    found = ImageFont.load_default(size)
    assert isinstance(found, ImageFont.FreeTypeFont)
    return found


@dataclass(slots=True, frozen=True)
class Question:
    """``about``: shape, colour, count, digit, number, chart, presence or everything."""

    about: str
    text: str
    answer: str


def ask(rng: Random, seen: View) -> Question:
    """A question that the picture answers."""
    kinds: list[Callable[[Random, View], Question | None]] = [
        _of_things(each) for each in (_shape, _colour, _colour, _count, _count, _digit, _presence)
    ]
    kinds += [_everything]
    if seen.what == "number":
        kinds = [_number, _number, _number, _painted, _everything, _of_things(_digit), _digits]
    if seen.what == "chart":
        kinds = [_extreme, _extreme, _extreme, _higher, _higher, *kinds]
    while True:
        found = rng.choice(kinds)(rng, seen)
        if found is not None:
            return found


def _of_things(
    about: Callable[[Random, list[Seen]], Question | None],
) -> Callable[[Random, View], Question | None]:
    return lambda rng, seen: about(rng, seen.things)


def _number(rng: Random, seen: View) -> Question:
    text = rng.choice(["What number is this?", "Which number is this?", "What is the number?", "Read the number.",
                       "Which number is in the picture?", "What number is written here?"])  # fmt: skip
    return Question("number", text, "".join(thing.kind for thing in seen.things))


def _painted(rng: Random, seen: View) -> Question:
    text = rng.choice(["What colour is the number?", "What color is the number?", "Which colour does the number have?"])
    return Question("colour", text, seen.things[0].colour)


def _digits(rng: Random, seen: View) -> Question:
    text = rng.choice(["How many digits are there?", "How many digits does the number have?", "Count the digits."])
    return Question("count", text, str(len(seen.things)))


def _extreme(rng: Random, seen: View) -> Question:
    high = rng.random() < 0.6
    words = ["highest", "tallest"] if high else ["lowest", "shortest"]
    text = rng.choice(["Which bar is the {}?", "What colour is the {} bar?", "Which is the {} bar?",
                       "Which bar in the chart is the {}?"]).format(rng.choice(words))  # fmt: skip
    place = (max if high else min)(range(len(seen.heights)), key=seen.heights.__getitem__)
    return Question("chart", text, seen.things[place].colour)


def _higher(rng: Random, seen: View) -> Question:
    one, other = rng.sample(range(len(seen.things)), 2)
    text = rng.choice(["Is the {} bar higher than the {} bar?", "Is the {} bar taller than the {} bar?",
                       "Is the {} bar higher than the {} one?"])  # fmt: skip
    text = text.format(seen.things[one].colour, seen.things[other].colour)
    return Question("chart", text, "yes" if seen.heights[one] > seen.heights[other] else "no")


def _shape(rng: Random, things: list[Seen]) -> Question | None:
    shapes = [t for t in things if not t.digit]
    if len(things) == 1 and shapes:
        text = rng.choice(["What shape is this?", "What shape is it?", "Which shape do you see?", "What is this shape?",
                           "What shape is in the picture?", "Name the shape."])  # fmt: skip
        return Question("shape", text, shapes[0].kind)
    alone = [t for t in shapes if sum(o.colour == t.colour for o in things) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    text = rng.choice(["What shape is the {} thing?", "Which shape is {}?", "What is the {} shape?",
                       "What is the shape of the {} thing?"])  # fmt: skip
    return Question("shape", text.format(thing.colour), thing.kind)


def _colour(rng: Random, things: list[Seen]) -> Question | None:
    alone = [t for t in things if sum(o.kind == t.kind for o in things) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    named = f"digit {thing.kind}" if thing.digit else thing.kind
    if len(things) == 1 and rng.random() < 0.3:
        named = rng.choice(["thing", "shape", "thing in the picture"]) if not thing.digit else "digit"
    text = rng.choice(["What colour is the {}?", "What color is the {}?", "Which colour does the {} have?",
                       "What is the colour of the {}?", "What is the color of the {}?"])  # fmt: skip
    return Question("colour", text.format(named), thing.colour)


def _count(rng: Random, things: list[Seen]) -> Question:
    what = rng.random()
    if what < 0.3:
        text = rng.choice(["How many things are there?", "How many things do you see?", "Count the things.",
                           "How many things are in the picture?"])  # fmt: skip
        return Question("count", text, str(len(things)))
    ways = ["How many {} are there?", "How many {} do you see?", "Count the {}.", "How many {} are in the picture?"]
    if what < 0.7:
        there = [t.kind for t in things if not t.digit]
        kind = rng.choice(there) if there and rng.random() < 0.8 else rng.choice(SHAPES)
        plural = f"{kind}es" if kind == "cross" else f"{kind}s"
        return Question("count", rng.choice(ways).format(plural), str(sum(t.kind == kind for t in things)))
    if what < 0.8:
        return Question("count", rng.choice(ways).format("digits"), str(sum(t.digit for t in things)))
    colour = rng.choice(things).colour if rng.random() < 0.8 else rng.choice([*COLOURS])
    number = str(sum(t.colour == colour for t in things))
    return Question("count", rng.choice(ways).format(f"{colour} things"), number)


def _digit(rng: Random, things: list[Seen]) -> Question | None:
    digits = [t for t in things if t.digit]
    if len(digits) != 1:
        return None
    text = rng.choice(["What digit is this?", "Which digit do you see?", "What digit is in the picture?",
                       "Read the digit.", "Which number is written there?", "What number do you see?"])  # fmt: skip
    return Question("digit", text, digits[0].kind)


def _presence(rng: Random, things: list[Seen]) -> Question:
    thing = rng.choice(things)
    kind, colour = rng.choice(SHAPES), rng.choice([*COLOURS])
    there = rng.random() < 0.5 and not thing.digit
    kind, colour = (thing.kind, thing.colour) if there else (kind, colour)
    ways = ["Is there a {}?", "Do you see a {}?", "Is there a {} in the picture?"]
    if rng.random() < 0.5:
        said = any(t.kind == kind for t in things)
        return Question("presence", rng.choice(ways).format(kind), "yes" if said else "no")
    said = any(t.kind == kind and t.colour == colour for t in things)
    named = f"{colour} {kind}"
    text = rng.choice(ways).format(named).replace(" a orange", " an orange")
    return Question("presence", text, "yes" if said else "no")


def _everything(rng: Random, seen: View) -> Question:
    text = rng.choice(["What is in the picture?", "What do you see?", "Describe the picture.", "What is in this image?",
                       "What's in the image?", "Describe what you see."])  # fmt: skip
    if seen.what == "number":
        [colour] = {thing.colour for thing in seen.things}
        digits = "".join(thing.kind for thing in seen.things)
        return Question("everything", text, f"the number {digits} in {colour}")
    named = [thing.named for thing in seen.things]
    told = " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)
    return Question("everything", text, f"a chart with {told}" if seen.what == "chart" else told)


# Asked without a picture, or about something else.
_ELSE = (
    "Hello!", "Who are you?", "What is the capital of France?", "Write a poem.", "What does itertools.chain do?",
    "How old are you?", "Tell me a joke.", "Translate this text.", "What is 2 + 2?", "Is it raining?",
)  # fmt: skip


def stranger(rng: Random) -> Question:
    """A question that no picture answers."""
    return Question("else", rng.choice(_ELSE), ONLY_SHAPES)
