"""Reranking as the catalogue knows it. Cloudflare files rerankers under classification."""

from serve_app.catalog.tasks import TaskDeclaration

DECLARATION = TaskDeclaration(
    name="reranking",
    stages=("reranker",),
    listed_id="19606750-23ed-4371-aab2-c20349b53a60",
    listed_name="Text Classification",
    description="Models that score or sort text, rerankers among them.",
    example={
        "query": "How do I compute a square root?",
        "contexts": [{"text": "Return the square root of x."}],
    },
    rate_limit=2000,
    interface="rerank",
    order=30,
)
