"""Translation as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="translation",
    stages=("predictor",),
    listed_id="f57d07cb-9087-487a-bbbf-bc3e17fecc4b",
    listed_name="Translation",
    description="Models that translate text from one language to another.",
    example={"text": "How are you?", "source_lang": "en", "target_lang": "fr"},
    units=("input", "output"),
    rate_limit=720,
    order=70,
)
