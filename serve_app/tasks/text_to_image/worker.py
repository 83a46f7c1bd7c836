"""What the worker of a model that draws does: a pipeline of diffusers, of the families that are known."""

from serve_app.predict.drawing.painter import Missing, Painter
from serve_app.predict.drawing.pipelines import installed
from serve_app.predict.predictor import Place, Predictor


def load(place: Place) -> Predictor:
    return Painter(place)


def stand_in() -> Predictor | None:
    """Where diffusers is not installed: gigabytes are not fetched for a refusal."""
    return None if installed() else Missing()
