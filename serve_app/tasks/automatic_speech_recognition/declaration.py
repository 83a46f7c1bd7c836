"""Speech recognition as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="automatic-speech-recognition",
    stages=("predictor",),
    listed_id="dfce1c48-2a81-462e-a7fd-de97ce985207",
    listed_name="Automatic Speech Recognition",
    description="Models that write down what is said, and when.",
    example={"audio": "(base64 of a WAV, FLAC, MP3, Ogg, M4A or WebM file)"},
    units=("audio_minute", "streamed_audio_minute"),
    rate_limit=720,
    order=60,
)
