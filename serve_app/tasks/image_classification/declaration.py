"""Image classification as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="image-classification",
    stages=("predictor",),
    listed_id="00cd182b-bf30-4fc4-8481-84a3ab349657",
    listed_name="Image Classification",
    description="Models that tell what is on a picture.",
    example={"image": "(base64 of a PNG)"},
    units=("million_images",),
    rate_limit=3000,
    order=50,
)
