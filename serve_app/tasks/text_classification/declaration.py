"""Text classification as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="text-classification",
    stages=("predictor",),
    listed_id="19606750-23ed-4371-aab2-c20349b53a60",
    listed_name="Text Classification",
    description="Models that sort text into classes, by sentiment for example.",
    example={"text": "What a lovely evening!"},
    rate_limit=2000,
    order=40,
)
