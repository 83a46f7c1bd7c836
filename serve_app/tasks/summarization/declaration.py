"""Summaries as the catalogue knows them."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="summarization",
    stages=("predictor",),
    listed_id="6f4e65d8-da0f-40d2-9aa4-db582a5a04fd",
    listed_name="Summarization",
    description="Models that write down what matters of a text.",
    example={
        "input_text": "On Friday a storm struck Oakham. The library stayed open. Four people were hurt. The cause was "
        "a cold front. Many people took photographs.",
        "max_length": 64,
    },
    units=("input", "output"),
    rate_limit=1500,
    order=71,
)
