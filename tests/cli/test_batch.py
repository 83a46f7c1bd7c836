"""`serve-app batch` and `AI().batch` against a gateway's HTTP application with a runner beside it."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from serve_app.cli import batch as command
from serve_app.client import batches as client
from serve_app.client.batches import AsyncBatchHandle, Batches, BatchHandle
from serve_app.client.server import ServerError
from serve_app.gateway.batches import Works
from tests.tasks.conftest import KEY, record, serve  # noqa: F401


@pytest.fixture
async def batches(echo):
    """Those of a gateway, beside which runs what runs them."""
    await echo.gateway.state.start()
    running = asyncio.ensure_future(Works(echo.gateway).run())
    yield Batches.connect()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def shell(batches, shell):  # noqa: F811
    return partial(shell, "batch")


def lines_of(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


async def test_a_file_of_bodies_from_submit_to_delete(echo, shell, tmp_path):
    rows = [{"prompt": f"p{n}", "external_reference": f"row-{n}", "max_tokens": 4} for n in range(3)]
    file = lines_of(tmp_path / "in.jsonl", *rows, {"prompt": "x", "temperature": "hot"})
    estimate = json.loads(
        (await shell("estimate", lines_of(tmp_path / "good.jsonl", *rows), "--model", echo.model, "--json"))[0]
    )
    assert estimate["requests"] == estimate["looked_at"] == 3 and estimate["wrong"] == 0
    assert estimate["units"]["most"]["output_tokens"] == 12 and estimate["finish_s"]["most"] == 86_400
    assert 0 < estimate["neurons"]["least"] <= estimate["neurons"]["expected"] <= estimate["neurons"]["most"]
    assert json.loads((await shell("list", "--json"))[0]) == []
    out, err = await shell("submit", file, "--model", echo.model, "--watch", "--key", "once", status=1)
    batch_id = err.split()[1]
    assert "3 succeeded, 1 failed" in out and batch_id in out
    again = (await shell("submit", file, "--model", echo.model, "--key", "once"))[0]
    assert again.strip() == batch_id
    assert "4 of 4" in (await shell("status", batch_id))[0]
    (listed,) = json.loads((await shell("list", "--json"))[0])
    assert (listed["id"], listed["status"], listed["door"]) == (batch_id, "completed", "python")
    assert batch_id in (await shell("list"))[0]
    told = [json.loads(line) for line in (await shell("results", batch_id))[0].splitlines()]
    assert [(each["id"], each["success"], each["external_reference"]) for each in told] == [
        (0, True, "row-0"), (1, True, "row-1"), (2, True, "row-2"), (3, False, None)
    ]  # fmt: skip
    assert "temperature" in json.dumps(told[3]["errors"])
    await shell("results", batch_id, "-o", str(tmp_path / "out.jsonl"))
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    # What is wrong stays wrong.
    assert "temperature" in (await shell("retry", batch_id, "--watch", status=1))[1]
    await shell("delete", batch_id)
    assert "no batch" in (await shell("status", batch_id, status=1))[1]


async def test_a_file_in_openais_form(echo, shell, tmp_path):
    row = {"method": "POST", "url": "/v1/completions", "body": {"model": echo.model, "prompt": "x", "max_tokens": 4}}
    file = lines_of(tmp_path / "in.jsonl", *({"custom_id": name, **row} for name in "ab"))
    said = (await shell("estimate", file))[0]
    assert "2 requests: " in said and "output tokens" in said and "to 24 h" in said
    out, err = await shell("submit", file, "--watch")
    assert "2 succeeded" in out
    told = [json.loads(line) for line in (await shell("results", err.split()[1]))[0].splitlines()]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in told] == [("a", 200), ("b", 200)]


async def test_ctrl_c_leaves_the_batch_running_and_says_how_to_come_back(shell, batches, echo, monkeypatch, tmp_path):
    file = lines_of(tmp_path / "in.jsonl", {"prompt": "x", "max_tokens": 4})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Batches, "wait", interrupted)
        _, err = await shell("submit", file, "--model", echo.model, "--watch", status=130)
    batch_id = err.split()[1]
    assert f"serve-app batch watch {batch_id}" in err
    assert "1 succeeded" in (await shell("watch", batch_id))[0]


async def test_what_is_wrong_is_said_with_its_line(shell, echo, tmp_path):
    file = tmp_path / "in.jsonl"
    for rows, more, said in (
        (['{"prompt": "x"}', "{", ""], ["--model", echo.model], "Line 2 is not valid JSON"),
        (['{"prompt": "x"}'], [], "name it with --model"),
        (['{"prompt": "x"}'], ["--model", "@cf/no/no"], "No such model"),
        ([""], ["--model", echo.model], "line 1 is no JSON"),
        (["[1]"], ["--model", echo.model], "no JSON object"),
    ):
        assert said in (await shell("submit", lines_of(file, *rows), *more, status=1))[1], said
    assert "No such file" in (await shell("submit", str(tmp_path / "none"), status=1))[1]


async def test_a_large_input_is_streamed_and_checked_by_the_runner(echo, batches, monkeypatch):
    monkeypatch.setattr("serve_app.gateway.http.routes.deferred.batch_lines.INLINE_BYTES", 100)
    asked = ({"prompt": f"p{n}", "max_tokens": 2} for n in range(50))
    made = await asyncio.to_thread(batches.submit, echo.model, asked)
    handle = BatchHandle(batches, made["id"])
    found = await asyncio.to_thread(handle.results)
    assert [each["id"] for each in found] == list(range(50)) and all(each["success"] for each in found)
    with pytest.raises(ServerError, match="Line 31 is not valid JSON"):
        lines = [b'{"prompt": "x"}\n'] * 30 + [b"{\n"]
        await asyncio.to_thread(batches.submit_lines, echo.model, lines)


async def test_answers_come_one_by_one_from_the_handle(echo, batches, monkeypatch):
    monkeypatch.setattr(client, "POLL_S", 0.02)
    made = await asyncio.to_thread(batches.submit, echo.model, [{"prompt": "x", "max_tokens": 2}] * 5)
    handle = AsyncBatchHandle(BatchHandle(batches, made["id"]))
    assert sorted([each["id"] async for each in handle]) == list(range(5))
    assert (await handle.status())["status"] == "completed" and len(await handle.results()) == 5
    assert (await handle.cancel())["status"] == "completed"


def test_progress_fits_a_line():
    batch = {
        "id": "b" * 32,
        "status": "running",
        "requests": {"total": 2000, "succeeded": 998, "failed": 2, "cancelled": 0, "expired": 0},
        "progress": {"done": 1000, "requests_per_second": 12.5, "seconds_left": 80.0},
        "usage": {"input_tokens": 5, "cached_tokens": 1, "output_tokens": 7},
        "neurons": 1.5,
        "cost": {"amount": "0.01", "currency": "USD"},
        "problems": [{"line": 3, "message": "bad"}],
    }
    said = command.progress(batch)
    assert " 50%  1,000 of 2,000  12.5/s  1 min 20 s left  2 failed" in said
    told = command.described(batch)
    assert "998 succeeded, 2 failed" in told and "0.01 USD" in told and "line 3: bad" in told
    assert [command.duration(each) for each in (5, 65, 3725)] == ["5 s", "1 min 05 s", "1 h 02 min"]
