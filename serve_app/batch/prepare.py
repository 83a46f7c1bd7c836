"""The input of a batch that lies in a blob, checked and cut by whoever has claimed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson

from serve_app.api.errors import ApiError
from serve_app.batch.apis import anthropic_api, native_api, openai_api
from serve_app.batch.check import Known
from serve_app.batch.intake import Intake, Problem, Refusal, ShardPlan
from serve_app.batch.split import ArrayItems, lines
from serve_app.state.blobs.files import Files, NoFile
from serve_app.state.deferred.batches import Batch


class Ended(Exception):
    """The batch was cancelled meanwhile, or belongs to somebody else."""


def prepare(
    files: Files, batch: Batch, known: Known, *, stop: Callable[[], bool] = lambda: False
) -> ShardPlan | Refusal:
    """Reads ``batch.input`` as its API has it, and writes the shards. Blocks, for minutes where there are a million
    requests. ``stop``: asked now and then whether to leave it; raises `Ended` then.
    """
    about = orjson.loads(batch.about)
    if batch.door == "openai":
        api = openai_api(about["endpoint"])
    elif batch.door == "anthropic":
        api = anthropic_api(checked=True)
    else:
        api = native_api(batch.caller.account, about.get("model", ""))
    # APIs with bounds of their own have held them.
    most = known.most if batch.door == "openai" else 1 << 31
    intake = Intake(api, known, batch.caller, most=most)
    try:
        if not batch.input:
            return _refused("server_error", "The server was lost while it read this batch; send it again.")
        pieces = _watched(files.stream(batch.input), stop)
        if batch.door == "openai":
            for number, line in lines(pieces, known.longest):
                intake.take(number, line)
        else:
            items = ArrayItems("requests", known.longest)
            for piece in pieces:
                for item in items.feed(piece):
                    intake.take(intake.total, item)
            items.finish()
        return intake.plan(files, batch.id)
    except ApiError as error:
        return _refused(error.name or str(error.code), error.message)
    except NoFile:
        return _refused("invalid_input_file", "The input file was deleted before it was read; upload it again.")
    finally:
        intake.close()


def _refused(code: str, message: str) -> Refusal:
    return Refusal.of([Problem(code, message)])


def _watched(pieces: Iterator[bytes], stop: Callable[[], bool]) -> Iterator[bytes]:
    for piece in pieces:
        if stop():
            raise Ended
        yield piece
