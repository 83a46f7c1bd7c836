"""Text generation as the catalogue knows it."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="text-generation",
    stages=("decode", "prefill", "draft"),
    listed_id="c329a1f9-323d-4e91-b2aa-582dd4188d34",
    listed_name="Text Generation",
    description="Models that write text: chat, completion, tool calls.",
    example={"prompt": "What does itertools.chain do?"},
    units=("input", "cached", "output"),
    rate_limit=300,
    optional_stages=("draft",),
    answering_stages=("decode", "prefill"),
    record_fields=frozenset({"quantization", "draft", "lora"}),
    operation="chat",
    interface="chat",
    order=10,
    # It takes longest to load and is what most people come for.
    starts_first=True,
)
