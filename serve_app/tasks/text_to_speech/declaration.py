"""Speech from text as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="text-to-speech",
    stages=("predictor",),
    listed_id="b52660a1-9a95-4ab2-8b1d-f232be34604a",
    listed_name="Text-to-Speech",
    description="Models that say a text.",
    example={"prompt": "Good morning.", "lang": "en"},
    units=("audio_minute", "thousand_characters"),
    rate_limit=720,
    interface="speech",
    order=65,
)
