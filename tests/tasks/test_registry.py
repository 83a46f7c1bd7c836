"""A task is one folder: nothing else names it, and one that is dropped in is served."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import serve_app.tasks
from deployments.model import home
from serve_app.api.multipart import BodyPart, read_multipart, write_multipart
from serve_app.catalog.load import load_catalog
from serve_app.catalog.tasks import declared
from serve_app.catalog.tasks import folders as folders_of_tasks
from serve_app.config import cloudflare_rate_limits
from serve_app.tasks.registry import tasks
from tests.tasks.conftest import ACCOUNT

ROOT = Path(__file__).resolve().parents[2]
# The folders themselves; the survey of what transformers' architectures do, which a new task does not change; faults
# and noise, which are aimed at what there is, the table of what its readers take, the benchmark of one task, and the
# form for records, of which one task's have more fields.
ELSEWHERE = ("serve_app/tasks", "benchmarks/families", "benchmarks/chaos", "benchmarks/fuzz", "benchmarks/fields.py",
             "benchmarks/speech", "serve_app/dashboard/static/js/models/record.js")  # fmt: skip
SOUND = bytes(range(256)) + b"\r\n--\r\n\n"


def test_nothing_but_its_folder_names_a_task() -> None:
    # As code names them: some are words of plain English as well. Their folders, and what they are listed as, too.
    listed = {re.escape(task.listed_name) for task in declared().values()}
    folders = "|".join(re.escape(folder) for folder in folders_of_tasks())
    names = re.compile(f"[\"']({'|'.join([*declared(), *listed])})[\"']|\\b({folders})\\b")
    rooms = ((room, kind) for room in ("serve_app", "deployments", "benchmarks") for kind in ("*.py", "*.js"))
    sources = [path for room, kind in rooms for path in (ROOT / room).rglob(kind) if "vendor" not in path.parts]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources
        if not any(path.is_relative_to(ROOT / folder) for folder in ELSEWHERE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if names.search(line)
    ]
    assert len(sources) > 100 and wrong == []
    assert names.search("from serve_app.tasks.text_to_speech.run import speak") and names.search('"Text Generation"')


@pytest.mark.parametrize("name", list(declared()))
def test_each_folder_has_what_the_others_ask_for(name: str) -> None:
    task, declaration = tasks()[name], declared()[name]
    assert task.declaration is declaration and declaration.stages
    assert set(task.schema()) == {"input", "output"}
    record = next(record for record in load_catalog() if record.task == name)
    # The stage that requests are sent to has a module that binds the application.
    assert callable(home(record).application)
    assert cloudflare_rate_limits()[name] == declaration.rate_limit


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the folder of a new task where the others are found; no other file knows of it."""
    more = str(Path(__file__).parent / "folders")
    monkeypatch.setattr(serve_app.tasks, "__path__", [*serve_app.tasks.__path__, more])
    yield
    for name in [name for name in sys.modules if name.startswith("serve_app.tasks.echo")]:
        del sys.modules[name]


async def test_a_task_dropped_in_is_served(folder: None, serve, record) -> None:
    async def parrot(model, method, wire):
        assert method == "repeat"
        return wire

    model = record("echo", "parrot")
    async with serve(parrot, models=(model,), rate_limits={"echo": 100}) as served:
        http, run = served.http, f"{ACCOUNT}/run/{model}"
        heard = await http.post(run, content=SOUND, headers={"Content-Type": "audio/wav"})
        assert heard.status_code == 200 and heard.content == SOUND
        assert heard.headers["content-type"] == "audio/x-parrot" and '"echo";r=99' in heard.headers["ratelimit"]

        several = await http.post(run, files={"sound": ("a.wav", SOUND, "audio/wav")}, data={"times": "2"})
        parts = read_multipart(several.content, several.headers["content-type"])
        assert [(part.name, part.data) for part in parts] == [("sound0", SOUND), ("sound1", SOUND)]

        refused = await http.post(run, data={"times": "2"}, files={"x": b""})
        assert refused.status_code == 400 and "sound is missing" in refused.text
        assert (await http.post(run, content=bytes(5000))).status_code == 413
        assert (await http.post(run)).json()["errors"][0]["code"] == 3003

        # It is in the lists, has schemas, and each piece of work has been settled and traced.
        listed = (await http.get(f"{ACCOUNT}/models/search")).json()["result"]
        assert [(item["task"]["name"], item["properties"][-1]["value"]) for item in listed] == [
            ("Echo", [{"unit": "per M input tokens", "price": 11.0, "currency": "USD", "neurons": 1000000.0}])
        ]
        schema = (await http.get(f"{ACCOUNT}/models/schema", params={"model": model})).json()["result"]
        assert schema["input"]["contentMediaType"] == "audio/x-parrot"
        assert schema["input"]["examples"] == [dict(declared()["echo"].example)]
        assert served.endings == [("echo", "done")] * 2
        assert served.settled[0].usage.prompt_tokens == len(SOUND) and served.settled[0].usage.micro_neurons > 0
        trace = (await http.get(f"/v1/requests/{heard.headers['cf-ray']}")).json()
        assert trace["status"] == "done" and trace["events"][0]["bytes"] == len(SOUND)


async def test_tasks_of_json_take_nothing_else(serve) -> None:
    async with serve() as served:
        run = f"{ACCOUNT}/run/@cf/pico/pico-instruct"
        for answer in (
            await served.http.post(run, content=SOUND, headers={"Content-Type": "audio/wav"}),
            await served.http.post(run, files={"prompt": b"Hello"}),
        ):
            assert answer.status_code == 400 and answer.json()["errors"][0]["code"] == 5006
            assert "not valid JSON" in answer.text
        assert served.endings == []


def test_multipart_holds_what_was_put_in() -> None:
    parts = [
        BodyPart("a", SOUND, "audio/wav", 'sound "1".wav'),
        BodyPart("b", b"", "text/plain"),
        BodyPart("c", b"\r\n"),
    ]
    body, content_type = write_multipart(parts)
    assert read_multipart(body, content_type) == parts


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"--x--", "multipart/form-data"),
        (b"no boundary here", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nunnamed\r\n--x--", "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\ncut', "multipart/form-data; boundary=x"),
        (b"--x\r\nno headers", "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 70 + b"--x--", "multipart/x; boundary=x"),
    ],
)
def test_broken_multipart_is_refused(data: bytes, content_type: str) -> None:
    from serve_app.api.errors import InvalidInput

    with pytest.raises(InvalidInput):
        read_multipart(data, content_type)
