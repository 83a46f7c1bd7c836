"""Where the disk, or the bucket, takes nothing: every API that needs files says so, and nothing is left behind."""

from __future__ import annotations

import errno
import os

from serve_app.state.blobs import files as files_module
from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_batch_apis import chat, created, echo, uploaded  # noqa: F401 - a fixture


async def test_files_that_cannot_be_had_are_asked_for_again_and_leave_nothing(echo, monkeypatch):  # noqa: F811
    """By every API that writes some, and by those that read: 503 with the time to wait, as for the store."""
    http, model = echo.http, echo.model
    rows = [chat(model, i) for i in range(2)]
    file = (await uploaded(http, rows)).json()["id"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    small = {"model": model, "messages": [{"role": "user", "content": "word"}], "max_tokens": 4}
    many = [{"custom_id": f"r{i}", "params": small} for i in range(2)]
    long = [{"custom_id": f"r{i}", "params": {**small, "metadata": {"user_id": "x" * 200}}} for i in range(2000)]
    with monkeypatch.context() as patched:
        patched.setattr(files_module, "_write", full)
        answers = [
            await http.post(f"{ACCOUNT}/run/{model}?queueRequest=true", json={"requests": [{"prompt": "one"}]}),
            await uploaded(http, rows),
            await created(http, file),
            await http.post("/v1/messages/batches", json={"requests": many}),
            await http.post("/v1/messages/batches", json={"requests": long}),
        ]
        patched.setattr(files_module, "open", full, raising=False)
        patched.setattr(files_module.DirectoryFiles, "_pieces", full)
        answers.append(await created(http, file))
        patched.setattr("fsspec.implementations.local.LocalFileSystem.size", full)
        answers.append(await http.get(f"/v1/files/{file}/content"))
    assert (await http.get("/health")).json()["store"] == {"status": "ready", "files": "away"}
    assert "No space left" in (await http.get("/v1/status")).json()["gateway"]["store"]["problem"]
    for answer in answers:
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0, answer.text
        assert "3040" in answer.text or "api_error" in answer.text or "overloaded" in answer.text, answer.text
    assert (await http.get(f"{ACCOUNT}/batches")).json()["result"] == []
    assert [one["id"] for one in (await http.get("/v1/files")).json()["data"]] == [file]
    assert (await created(http, file)).status_code == 200
    assert (await http.get("/health")).json()["store"] == {"status": "ready"}
