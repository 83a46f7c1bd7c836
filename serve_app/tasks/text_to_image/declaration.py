"""Drawing as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="text-to-image",
    stages=("predictor",),
    listed_id="3d6e1f35-341b-4915-a6c8-9a7142a9033a",
    listed_name="Text-to-Image",
    description="Models that draw what a text says, and change pictures.",
    example={"prompt": "A lighthouse at dawn, oil on canvas"},
    units=("tile", "step", "tile_step", "input_tile", "input_tile_step"),
    rate_limit=720,
    record_fields=frozenset({"drawing"}),
    interface="pictures",
    order=70,
)
