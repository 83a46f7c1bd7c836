"""Results as each API's clients read them."""

from __future__ import annotations

from typing import Any

import orjson
from anthropic.types.messages import MessageBatchIndividualResponse

from serve_app.batch.results import lines
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch, Result

ID = "ab" * 16
BODY = {"choices": [], "n": 1}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m", "stop_reason": None,
           "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip


def results(good: Any, bad: Any) -> list[Result]:
    return [
        Result(0, "a", "succeeded", 200, orjson.dumps(good), "f" * 32),
        Result(1, "b", "failed", 400, orjson.dumps(bad), "e" * 32),
        Result(2, "c", "expired", 0, b""),
        Result(3, "d", "cancelled", 0, b""),
    ]


def read(door: str, found: list[Result], *, errors: bool) -> list[dict[str, Any]]:
    batch = Batch(ID, door, Caller("local"), 0.0, 9.0, 9.0)
    return [orjson.loads(line) for line in lines(batch, found, errors=errors)]


def test_openais_lines():
    found = results(BODY, {"error": {"message": "no"}})
    (good,) = read("openai", found, errors=False)
    assert good == {
        "id": f"batch_req_{ID[:24]}00000000", "custom_id": "a", "error": None,
        "response": {"status_code": 200, "request_id": "f" * 32, "body": BODY},
    }  # fmt: skip
    failed, expired, cancelled = read("openai", found, errors=True)
    assert failed["response"] == {"status_code": 400, "request_id": "e" * 32, "body": {"error": {"message": "no"}}}
    assert (expired["response"], expired["error"]["code"]) == (None, "batch_expired")
    assert (cancelled["custom_id"], cancelled["error"]["code"]) == ("d", "batch_cancelled")


def test_anthropics_lines():
    found = results(MESSAGE, {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}})
    assert not read("anthropic", found, errors=True)
    told = [MessageBatchIndividualResponse.model_validate(line) for line in read("anthropic", found, errors=False)]
    assert [(one.custom_id, one.result.type) for one in told] == [
        ("a", "succeeded"), ("b", "errored"), ("c", "expired"), ("d", "canceled")
    ]  # fmt: skip
    assert told[1].result.error.error.message == "no" and told[0].result.message.id == "msg_1"


def test_native_ones():
    found = results({"result": {"response": "x"}, "success": True, "errors": []},
                    {"result": {}, "success": False, "errors": [{"code": 5006, "message": "no"}]})  # fmt: skip
    good, bad, expired, _ = read("workers-ai", found, errors=False)
    assert good == {"id": 0, "result": {"response": "x"}, "success": True, "external_reference": "a"}
    assert not bad["success"] and bad["errors"][0]["code"] == 5006 and bad["external_reference"] == "b"
    assert not expired["success"] and expired["errors"][0]["code"] == 3040
