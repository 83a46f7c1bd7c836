"""Object detection as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="object-detection",
    stages=("predictor",),
    listed_id="9c178979-90d9-49d8-9e2c-0f1cf01815d4",
    listed_name="Object Detection",
    description="Models that find things on a picture, and where they are.",
    example={"image": "(base64 of a PNG)"},
    units=("million_images",),
    rate_limit=3000,
    order=51,
)
