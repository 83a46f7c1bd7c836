"""What the worker of a speaker does: VITS, one sentence after the other."""

from serve_app.predict.predictor import Place
from serve_app.predict.speech.vits import Vits


def load(place: Place) -> Vits:
    return Vits(place)
