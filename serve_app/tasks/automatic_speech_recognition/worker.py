"""What the worker of a recogniser does: Whisper, in windows of half a minute."""

from serve_app.predict.predictor import Place
from serve_app.predict.speech.whisper import Whisper


def load(place: Place) -> Whisper:
    return Whisper(place)
