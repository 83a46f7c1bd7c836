"""One question for each model that runs on a machine without a GPU, whose answer is known: what it is asked, and what
is wrong with an answer.
"""

from __future__ import annotations

import base64
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from random import Random
from typing import Any

from benchmarks import ROOT
from benchmarks.serving.startup import ANSWER, QUESTION, TOKENS
from serve_app.catalog.load import load_catalog

EMBED = "@cf/sentence-transformers/all-minilm-l6-v2"
# More than one needs that waits for all others' turns.
TIMEOUT_S = 300.0


@dataclass(slots=True, frozen=True)
class Known:
    """``body``: JSON or a file. ``problem``: what is wrong with the result of the native call, None if nothing is."""

    model: str
    body: dict[str, Any] | bytes
    problem: Callable[[Any], str | None]

    @property
    def task(self) -> str:
        """As the model's record has it."""
        return load_catalog()[self.model].task

    def ask(self, url: str, key: str, *, account: str = "local", model: str = "") -> str | None:
        """Asks once; what is wrong with the answer. ``model``: another one's name for the same."""
        sent = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        kind = "application/octet-stream" if isinstance(self.body, bytes) else "application/json"
        request = urllib.request.Request(
            f"{url}/client/v4/accounts/{account}/ai/run/{model or self.model}", sent,
            {"Authorization": f"Bearer {key}", "Content-Type": kind},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return self.problem(json.load(answer)["result"])
        except urllib.error.HTTPError as error:
            return f"status {error.code}: {error.read()[:300].decode(errors='replace')}"
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"


def known() -> list[Known]:
    """Of every model; files and texts are made here, and are none that a model has been trained with."""
    from training.looking import draw as draw_to_look
    from training.rewriting.reports import make as make_report
    from training.rewriting.sentences import LANGUAGES
    from training.rewriting.sentences import make as make_sentence
    from training.scenes import SHAPES, draw, draw_one

    one, shape = draw_one(Random("from zero"))
    scene, things = draw(Random("detect 4"), 3)
    wanted = sorted(SHAPES[thing.shape] for thing in things)
    report, summary = make_report(Random("served"), held_out=True)
    said = dict(zip(LANGUAGES, make_sentence(Random("served"), held_out=True), strict=True))
    source, target = LANGUAGES[0], LANGUAGES[1]
    looked, [thing] = draw_to_look(Random("one red circle"), 1)
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates have risen again."]
    contexts = [{"text": "Join two paths."}, {"text": "Return the square root of x."}]
    sound = (ROOT / "checkpoints" / "pico-hearing" / "example.wav").read_bytes()
    ask = {"max_tokens": TOKENS, "temperature": 0}
    return [
        Known("@cf/pico/pico-instruct", {"messages": [{"role": "user", "content": QUESTION}], **ask},
              lambda r: _same(r["response"], ANSWER)),
        Known("@cf/pico/pico-vision",
              {"prompt": "What do you see?", "image": _png64(looked), "max_tokens": 24, "temperature": 0},
              lambda r: _within(f"{thing.colour} {thing.kind}", r["response"])),
        Known("@cf/pico/pico-describer", {"image": _png64(looked), "max_tokens": 24, "temperature": 0},
              lambda r: _within(f"{thing.colour} {thing.kind}", r["description"])),
        Known("@cf/pico/pico-speaker", {"prompt": "Turn off the radio in the kitchen."},
              lambda r: _sounds(base64.b64decode(r["audio"]))),
        Known(EMBED, {"text": texts}, lambda r: _near(r["data"])),
        Known("@cf/pico/pico-reranker", {"query": "square root", "contexts": contexts},
              lambda r: _same(max(r["response"], key=lambda one: one["score"])["id"], 1)),
        Known("@cf/pico/pico-sentiment", {"text": "What a wonderful evening!"},
              lambda r: _same(max(r, key=lambda one: one["score"])["label"], "POSITIVE")),
        Known("@cf/pico/pico-shapes", _png(one),
              lambda r: _same(max(r, key=lambda one: one["score"])["label"], SHAPES[shape])),
        Known("@cf/pico/pico-detector", _png(scene.resize((256, 256))),
              lambda r: _same(sorted(one["label"] for one in r), wanted)),
        Known("@cf/pico/pico-summary", {"input_text": report},
              lambda r: _same(r["summary"], summary)),
        Known("@cf/pico/pico-translator", {"text": said[source], "source_lang": source, "target_lang": target},
              lambda r: _same(r["translated_text"], said[target])),
        Known("@cf/pico/pico-hearing", sound,
              lambda r: _same(r["text"].strip(), "Turn off the radio in the kitchen.")),
    ]  # fmt: skip


def _same(got: Any, wanted: Any) -> str | None:
    return None if got == wanted else f"{got!r} instead of {wanted!r}"


def _sounds(file: bytes) -> str | None:
    """An MP3 of a second and more."""
    return None if file[:3] == b"ID3" or file[:1] == b"\xff" and len(file) > 4000 else f"{len(file)} bytes, no MP3"


def _within(wanted: str, text: str) -> str | None:
    return None if wanted in text else f"{text!r} has no {wanted!r}"


def _near(vectors: list[list[float]]) -> str | None:
    """The first two texts say the same, the third something else."""

    def cosine(a: list[float], b: list[float]) -> float:
        across = sum(x * y for x, y in zip(a, b, strict=True))
        return across / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    same, other = cosine(vectors[0], vectors[1]), cosine(vectors[0], vectors[2])
    return None if len(vectors[0]) == 384 and same > 0.5 > other + 0.2 else f"cosines {same:.2f} and {other:.2f}"


def _png(image: Any) -> bytes:
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _png64(image: Any) -> str:
    return base64.b64encode(_png(image)).decode()
