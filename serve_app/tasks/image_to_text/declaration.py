"""Descriptions of pictures as the catalogue knows them."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="image-to-text",
    stages=("decode", "prefill", "draft"),
    listed_id="882a91d1-c331-4eec-bdad-834c919942a8",
    listed_name="Image-to-Text",
    description="Models that say what is on a picture.",
    example={"image": "(base64 of a PNG)", "prompt": "What do you see?"},
    units=("input", "cached", "output"),
    rate_limit=720,
    optional_stages=("draft",),
    answering_stages=("decode", "prefill"),
    record_fields=frozenset({"quantization", "draft", "lora"}),
    operation="chat",
    order=65,
)
