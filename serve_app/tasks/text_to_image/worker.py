"""What the worker of a model that draws does: a pipeline of diffusers, of the families that are known."""

from serve_app.predict.drawing.painter import load_painter
from serve_app.predict.predictor import Place, Predictor


def load(place: Place) -> Predictor:
    return load_painter(place)
