"""Drawn scenes: coloured shapes on noisy grounds, with their boxes. The small models of pictures learn from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "bar")
SIDE = 64
# Objects lie in cells of their own, so that none hides another.
CELLS = 3
# Drawn larger and then made smaller, for smooth edges.
FINE = 2


@dataclass(slots=True, frozen=True)
class Thing:
    """``box``: left, top, right, bottom in pixels of the picture. ``cell``: where its middle lies, row by row."""

    shape: int
    box: tuple[float, float, float, float]
    cell: int


def draw(rng: Random, count: int, least: float = 12, most: float = 20) -> tuple[Image.Image, list[Thing]]:
    """A scene of ``SIDE`` pixels with ``count`` things in different cells."""
    ground = _colour(rng)
    picture = Image.new("RGB", (SIDE * FINE, SIDE * FINE), ground)
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.randrange(4)):
        points = [rng.uniform(0, SIDE * FINE) for _ in range(4)]
        pen.line(points, fill=_near(rng, ground), width=rng.randrange(1, 4))
    things = [_thing(rng, pen, ground, cell, least, most) for cell in rng.sample(range(CELLS * CELLS), count)]
    small = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 12), (SIDE, SIDE, 3))
    return Image.fromarray(np.clip(np.asarray(small) + noise, 0, 255).astype(np.uint8)), things


def draw_one(rng: Random) -> tuple[Image.Image, int]:
    """A scene with one large thing anywhere, and its shape."""
    ground = _colour(rng)
    picture = Image.new("RGB", (SIDE * FINE, SIDE * FINE), ground)
    pen = ImageDraw.Draw(picture)
    shape, size = rng.randrange(len(SHAPES)), rng.uniform(18, 48)
    x, y = (rng.uniform(size / 2, SIDE - size / 2) for _ in range(2))
    draw_shape(pen, shape, x, y, size, _apart(rng, ground), rng.uniform(-0.25, 0.25))
    small = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 16), (SIDE, SIDE, 3))
    return Image.fromarray(np.clip(np.asarray(small) + noise, 0, 255).astype(np.uint8)), shape


def _thing(
    rng: Random, pen: ImageDraw.ImageDraw, ground: tuple[int, int, int], cell: int, least: float, most: float
) -> Thing:
    side = SIDE / CELLS
    size, shape = rng.uniform(least, most), rng.randrange(len(SHAPES))
    slack = (side - size) / 2
    x = (cell % CELLS + 0.5) * side + rng.uniform(-slack, slack)
    y = (cell // CELLS + 0.5) * side + rng.uniform(-slack, slack)
    points = draw_shape(pen, shape, x, y, size, _apart(rng, ground), 0.0)
    across, down = [p[0] for p in points], [p[1] for p in points]
    return Thing(shape, (min(across), min(down), max(across), max(down)), cell)


def draw_shape(
    pen: ImageDraw.ImageDraw, shape: int, x: float, y: float, size: float, colour: tuple[int, int, int], turn: float
) -> list[tuple[float, float]]:
    """Draws it and returns points that bound it, in pixels of the picture."""
    half, name = size / 2, SHAPES[shape]
    if name in ("circle", "ring"):
        box = [(x - half) * FINE, (y - half) * FINE, (x + half) * FINE, (y + half) * FINE]
        if name == "circle":
            pen.ellipse(box, fill=colour)
        else:
            pen.ellipse(box, outline=colour, width=max(2, round(size * FINE / 5)))
        return [(x - half, y - half), (x + half, y + half)]
    cos, sin = half * math.cos(turn), half * math.sin(turn)
    points = [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in _outline(name)]
    pen.polygon([(a * FINE, b * FINE) for a, b in points], fill=colour)
    return points


def _outline(name: str) -> list[tuple[float, float]]:
    """Corners within the square from -1 to 1."""
    third = 0.36
    if name == "square":
        return [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]
    if name == "triangle":
        return [(0, -1), (1, 0.9), (-1, 0.9)]
    if name == "diamond":
        return [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)]
    if name == "bar":
        return [(-1, -0.3), (1, -0.3), (1, 0.3), (-1, 0.3)]
    if name == "star":
        radii = [1.0, 0.42] * 5
        return [(r * math.sin(i * math.pi / 5), -r * math.cos(i * math.pi / 5)) for i, r in enumerate(radii)]
    t = third
    return [(-t, -1), (t, -1), (t, -t), (1, -t), (1, t), (t, t), (t, 1), (-t, 1), (-t, t), (-1, t), (-1, -t), (-t, -t)]


def _colour(rng: Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _near(rng: Random, colour: tuple[int, int, int]) -> tuple[int, int, int]:
    r, g, b = (min(255, max(0, c + rng.randrange(-30, 31))) for c in colour)
    return r, g, b


def _apart(rng: Random, ground: tuple[int, int, int]) -> tuple[int, int, int]:
    """A colour that stands out."""
    while True:
        colour = _colour(rng)
        if sum(abs(a - b) for a, b in zip(colour, ground, strict=True)) >= 200:
            return colour
