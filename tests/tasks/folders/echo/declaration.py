"""A task of the tests: sounds come back as they are, or as parts."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="echo",
    stages=("parrot",),
    listed_id="00000000-0000-0000-0000-000000000000",
    listed_name="Echo",
    description="Models that repeat sounds.",
    example={"sound": "cuckoo"},
    units=("input",),
    rate_limit=2,
    order=5,
)
