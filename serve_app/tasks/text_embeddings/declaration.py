"""Text embeddings as the catalogue knows them."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="text-embeddings",
    stages=("embeddings",),
    listed_id="0137cdcf-162a-4108-94f2-1ca59e8c65ee",
    listed_name="Text Embeddings",
    description="Models that turn text into vectors.",
    example={"text": ["a sentence", "another one"]},
    rate_limit=3000,
    operation="embeddings",
    interface="embeddings",
    order=20,
)
