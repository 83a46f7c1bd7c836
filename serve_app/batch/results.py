"""Results as the API of their batch has them: lines of its files, one JSON object each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serve_app.api.anthropic import batches as anthropic
from serve_app.api.openai import batches as openai
from serve_app.api.workers_ai import batches as workers_ai
from serve_app.state.blobs.uploads import Upload, UploadStore, results_id
from serve_app.state.deferred.batches import Batch, Result


def lines(batch: Batch, results: Iterable[Result], *, errors: bool) -> Iterator[bytes]:
    """Lines of ``batch.output``, or of ``batch.errors``, where OpenAI's API alone has any: what did not succeed."""
    for result in results:
        if errors == (batch.door == "openai" and result.outcome != "succeeded"):
            yield line(batch, result)


def line(batch: Batch, result: Result) -> bytes:
    if batch.door == "openai":
        return openai.result_line(
            batch.id, result.number, result.id or "", result.outcome, result.status, result.request_id, result.body
        )
    if batch.door == "anthropic":
        return anthropic.result_line(result.id or "", result.outcome, result.body)
    return workers_ai.result_line(result.number, result.id, result.outcome, result.body)


def register(uploads: UploadStore, batch: Batch, output: int, errors: int, now: float) -> None:
    """Puts a batch's files, of so many bytes each, among the files of its account, where OpenAI's clients find them;
    doing it twice is doing it once. None is there where it has no bytes.
    """
    for kind, size in (("output", output), ("errors", errors)):
        if size:
            name = f"batch_{batch.id}_{'output' if kind == 'output' else 'error'}.jsonl"
            uploads.add(
                Upload(
                    results_id(batch.id, kind),
                    batch.caller.account,
                    "batch_output",
                    name,
                    size,
                    now,
                    f"batches/{batch.id}/{kind}.jsonl",
                    now + batch.keep_s,
                )
            )
