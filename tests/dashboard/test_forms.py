"""Forms of small tasks in a real Chromium, with their models in this process: files are dropped, answers are drawn."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import uvicorn

from serve_app.api.fields.content import HEARS
from serve_app.catalog.load import load_catalog
from serve_app.gateway.http.app import build_http
from serve_app.worker.predict_work import PredictWork
from serve_app.worker.spec import WorkerSpec
from tests.clients.test_node import HERE
from tests.e2e.dashboard.conftest import ARGUMENTS, CHROMIUM, PATIENCE_MS
from tests.e2e.dashboard.test_accessible import AXE
from tests.e2e.dashboard.test_samples import run, runs_here
from tests.media.files import sound
from tests.predict.pipelines import diffusion
from tests.predict.test_drawing import needs_diffusers
from tests.predict.test_rewriting import bart, m2m100
from tests.predict.test_speech import whisper
from tests.predict.test_vits import vits
from tests.tasks.conftest import ACCOUNT, KEY, Served, serve  # noqa: F401
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_small_tasks import DETECTOR, SENTIMENT, SHAPE, png
from training.scenes import SHAPES, draw, draw_one

SPEECH, TRANSLATION, SUMMARY, VOICE = (f"@cf/test/{name}" for name in ("speech", "translation", "summary", "voice"))
PAINTER = "@cf/test/painter"
TALK = "@cf/test/talk"
MADE = {
    SPEECH: ("automatic-speech-recognition", lambda folder: whisper(folder, 3)),
    TRANSLATION: ("translation", lambda folder: m2m100(folder, 1)),
    SUMMARY: ("summarization", bart),
    VOICE: ("text-to-speech", vits),
    PAINTER: ("text-to-image", lambda folder: diffusion(folder, blocks=4)),
}
RECORD = """\
id: "{model}"
task: {task}
description: Of a test.
created_at: "2026-01-02"
weights: {{path: {path}}}
price: {{input: 11.0, output: 11.0, audio_minute: 0.1}}
serving: {{local: {{predictor: {{}}}}}}
"""
LIGHTHOUSE = "A lighthouse at dawn, oil on canvas"
DRAWING = "drawing: {side: 256, steps: 2}\n"


class Page:
    """One page of a browser, of whoever signed in with the key of the settings. ``problems``: errors of scripts and
    violations of the policy.
    """

    def __init__(self, tab: Any, served: Served, url: str) -> None:
        self.tab, self.served, self.url = tab, served, url
        self.problems: list[str] = []
        self.workers: dict[str, PredictWork] = {}
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        refused = "Failed to load resource"
        tab.on("console", lambda said: said.type == "error" and refused not in said.text and self.note(said.text))

    def note(self, problem: str) -> None:
        self.problems.append(problem)

    async def open(self, model: str) -> None:
        await self.tab.evaluate("place => { location.hash = '#/' + place; }", f"playground?model={model}")
        await self.tab.get_by_role("button", name="Run").wait_for()

    async def run(self) -> Any:
        """Presses Run; the answer's part of the page."""
        await self.tab.get_by_role("button", name="Run").click()
        answer = self.tab.get_by_role("region", name="Answer", exact=True)
        await answer.wait_for()
        return answer

    async def said(self, model: str, body: dict[str, Any]) -> Any:
        """What the API answers."""
        answer = await self.served.http.post(f"{ACCOUNT}/run/{model}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    async def receipt(self, request: str) -> Any:
        return (await self.served.http.get(f"{ACCOUNT}/usage/{request}")).json()["result"]

    async def code(self, model: str) -> dict[tuple[str, str], str]:
        """The code of a model's page, by language and client."""
        await self.tab.evaluate("place => { location.hash = '#/' + place; }", f"models/{model}?tab=code")
        found = {}
        for language in ("curl", "Python", "JavaScript"):
            await self.tab.get_by_role("tab", name=language, exact=True).click()
            clients = self.tab.get_by_role("group", name="Client").get_by_role("button")
            for name in await clients.all_inner_texts() or [""]:
                if name:
                    await clients.get_by_text(name, exact=True).click()
                text = await self.tab.get_by_role("region", name="Code", exact=True).inner_text()
                assert model in text
                found[language, name] = text
        return found

    async def drop(self, data: bytes, name: str, kind: str) -> None:
        """As somebody drags it there."""
        carried = await self.tab.evaluate_handle(
            """([data, name, type]) => {
              const held = new DataTransfer();
              held.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, { type }));
              return held;
            }""",
            [base64.b64encode(data).decode(), name, kind],
        )
        await self.tab.locator(".drop").dispatch_event("drop", {"dataTransfer": carried})
        await self.tab.get_by_text(re.compile(rf"^{re.escape(name)}, ")).wait_for()

    async def accessible(self) -> list[str]:
        """What axe finds that is serious."""
        await self.tab.evaluate("window.axe || undefined") or await self.tab.evaluate(AXE)
        told = await self.tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [one for one in told["violations"] if one["impact"] in ("serious", "critical")]
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in serious]


async def plays(audio: Any, seconds: float) -> None:
    """Waits until a sound is there, which the policy has to let the page play."""
    loaded = (
        "async (one, seconds) => { while (!(one.duration > seconds)) await new Promise((on) => setTimeout(on, 50)); }"
    )
    await audio.evaluate(loaded, seconds)


@pytest.fixture
async def page(serve, tmp_path: Path) -> AsyncIterator[Page]:  # noqa: F811
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian's package is chromium)")
    (tmp_path / "models").mkdir()
    for model, (task, _) in MADE.items():
        text = RECORD.format(model=model, task=task, path=tmp_path / task)
        (tmp_path / "models" / f"{task}.yaml").write_text(text + (DRAWING if model == PAINTER else ""))
        (tmp_path / task).mkdir()
    talk = RECORD.format(model=TALK, task="text-generation", path=tmp_path).replace("predictor", "decode")
    (tmp_path / "models" / "talk.yaml").write_text(talk + "properties: {hearing: true}\n")
    catalog, workers = load_catalog(tmp_path), {}
    threads = torch.get_num_threads()

    async def call(model: Any, method: Any, wire: Any) -> Any:
        if model.id not in workers:
            record, source = catalog[model.id], str(catalog.source(model.id))
            if model.id in MADE:
                shutil.rmtree(tmp_path / record.task)
                MADE[model.id][1](tmp_path / record.task)
            spec = WorkerSpec(model.id, "predictor", record.weights.model_dump(), source, str(tmp_path),
                              task=record.task, dtype="float32", cpu_threads=1)  # fmt: skip
            workers[model.id] = PredictWork(spec, lambda step: None)
        return await getattr(workers[model.id], method.name)(wire)

    async def ask_all(model: Any, method: Any, wire: Any) -> Any:
        return [workers[model.id].progress(wire)] if model.id in workers else []

    async with serve(call, models=(SENTIMENT, SHAPE, DETECTOR, TALK, *MADE)) as served:
        served.gateway.backends[TALK] = EchoBackend(HEARS)
        served.gateway.runtime.ask_all = ask_all
        await served.gateway.state.start()
        config = uvicorn.Config(build_http(served.gateway), "127.0.0.1", 0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        async with api.async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            made = Page(await browser.new_page(viewport={"width": 1280, "height": 900}), served, url)
            made.workers = workers
            await made.tab.goto(f"{url}/dashboard#/playground?model={SENTIMENT}")
            await made.tab.get_by_label("API key").fill(KEY)
            await made.tab.keyboard.press("Enter")
            await made.tab.get_by_role("button", name="Run").wait_for()
            yield made
            await browser.close()
        server.should_exit = True
        await task
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
    assert made.problems == []


@pytest.mark.slow
async def test_a_picture_is_dropped_and_what_is_on_it_is_drawn(page: Page) -> None:
    image, things = draw(Random("detect 4"), 3)
    file = png(image.resize((256, 256)))
    await page.open(DETECTOR)
    assert await page.tab.get_by_role("button", name="Run").is_disabled()
    await page.drop(b"no picture", "notes.png", "image/png")
    await page.tab.get_by_role("button", name="Run").click()
    await page.tab.locator(".toast-bad").wait_for()  # in the API's words
    await page.drop(file, "scene.png", "image/png")
    answer = await page.run()
    found = await page.said(DETECTOR, {"image": base64.b64encode(file).decode()})
    assert {one["label"] for one in found} & {SHAPES[thing.shape] for thing in things}
    await answer.locator("svg rect").last.wait_for()
    read = "list => list.map((one) => ['x', 'y', 'width', 'height'].map((name) => Number(one.getAttribute(name))))"
    drawn = await answer.locator("svg rect").evaluate_all(read)
    boxes = [one["box"] for one in found]
    assert drawn == [[b["xmin"], b["ymin"], b["xmax"] - b["xmin"], b["ymax"] - b["ymin"]] for b in boxes]
    assert await answer.get_by_role("list", name="Labels").locator("strong").all_inner_texts() == [
        f"{one['score']:.4f}" for one in found
    ]
    assert await page.accessible() == []


@pytest.mark.slow
async def test_a_sound_goes_along_in_a_chat(page: Page) -> None:
    await page.tab.evaluate("place => { location.hash = '#/' + place; }", f"playground?model={TALK}")
    wav = sound(0.2)
    chosen = {"name": "said.wav", "mimeType": "audio/wav", "buffer": wav}
    await page.tab.get_by_label("Add a sound").set_input_files(chosen)
    await page.tab.get_by_text("A sound to send").wait_for()
    await page.tab.get_by_role("textbox", name="Message").fill("What is said?")
    await page.tab.get_by_role("button", name="Send").click()
    await page.tab.get_by_text("A sound that was sent").wait_for()
    await page.tab.locator(".message-assistant", has_text="What is said?").wait_for()
    heard, text = page.served.gateway.backends[TALK].seen
    assert heard == {"type": "audio", "source": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    assert text == {"type": "text", "text": "What is said?"} and await page.accessible() == []


@pytest.mark.slow  # six models are made and loaded
async def test_every_other_form(page: Page, tmp_path: Path) -> None:
    """The example stands in the form, so that Run is all there is to do; files are chosen by name."""
    answer = await page.run()
    scores = {one["label"]: one["score"] for one in await page.said(SENTIMENT, {"text": "What a lovely evening!"})}
    shown = await answer.get_by_role("list", name="Labels").locator("li").all_inner_texts()
    assert {one.split("\n")[0] for one in shown} == set(scores) == {"POSITIVE", "NEGATIVE"}
    assert all(f"{scores[one.split()[0]]:.4f}" in one for one in shown)

    image, shape = draw_one(Random(3))
    await page.open(SHAPE)
    chosen = {"name": "one.png", "mimeType": "image/png", "buffer": png(image)}
    await page.tab.locator("input[type=file]").set_input_files(chosen)
    await page.tab.get_by_label("top_k").fill("2")
    answer = await page.run()
    shown = await answer.get_by_role("list", name="Labels").locator("li").all_inner_texts()
    assert len(shown) == 2 and SHAPES[shape] in shown[0]

    await page.open(SPEECH)
    wav = sound(2.0)
    await page.tab.locator("input[type=file]").set_input_files(
        {"name": "said.wav", "mimeType": "audio/wav", "buffer": wav}
    )
    await plays(page.tab.locator("audio").first, 1.9)
    answer = await page.run()
    told = await page.said(SPEECH, {"audio": list(wav)})
    assert (await answer.locator(".said").inner_text()).split() == (told["text"] or "Nothing was said.").split()
    assert await answer.get_by_role("list", name="When it was said").locator("li").count() == len(told["segments"])
    async with page.tab.expect_download() as saved:
        await answer.get_by_role("button", name="Save subtitles").click()
    assert Path(await (await saved.value).path()).read_text() == told["vtt"]
    assert await page.accessible() == []

    await page.open(TRANSLATION)
    assert await page.tab.get_by_label("target_lang (needed)").input_value() == "fr"
    assert not await page.tab.get_by_label("target_language").count()
    await page.tab.get_by_label("text (needed)").fill("the quick brown fox")
    answer = await page.run()
    asked = {"text": "the quick brown fox", "source_lang": "en", "target_lang": "fr"}
    assert await answer.locator(".said").inner_text() == (await page.said(TRANSLATION, asked))["translated_text"]

    await page.open(SUMMARY)
    await page.tab.get_by_label("max_length").fill("9")
    answer = await page.run()
    text = await page.tab.get_by_label("input_text (needed)").input_value()
    wanted = await page.said(SUMMARY, {"input_text": text, "max_length": 9})
    assert await answer.locator(".said").inner_text() == wanted["summary"]

    await page.open(VOICE)
    assert not await page.tab.get_by_label("text (needed)").count()
    answer = await page.run()
    await plays(answer.locator("audio"), 0.02)
    async with page.tab.expect_download() as saved:
        await answer.get_by_role("button", name="Save the sound").click()
    kept = Path(await (await saved.value).path()).read_bytes()
    said = await page.said(VOICE, {"prompt": "Good morning.", "lang": "en"})
    assert kept == base64.b64decode(said["audio"])
    # What the ledger has of it, since the answer has no place for it.
    href = await answer.get_by_role("link", name="Request").get_attribute("href")
    await answer.get_by_text("Neurons").wait_for()
    told = await page.receipt((href or "").rpartition("/")[2])
    assert await answer.locator("dt:text-is('Neurons') + dd").inner_text() == f"{told['neurons']:.6f}".rstrip("0")
    assert await page.accessible() == []


@needs_diffusers
@pytest.mark.slow  # diffusers is imported
async def test_a_picture_is_drawn(page: Page, tmp_path: Path) -> None:
    """Step by step, until it is there or somebody has it stopped; and by the code of its page."""
    drawn = await page.served.http.post(f"{ACCOUNT}/run/{PAINTER}", json={"prompt": LIGHTHOUSE, "seed": 7})
    await page.open(PAINTER)
    assert not await page.tab.get_by_label("stream").count()
    await page.tab.get_by_label("seed").fill("7")
    answer = await page.run()
    picture = answer.get_by_role("img", name="The model's picture")
    assert await picture.evaluate("async (one) => { await one.decode(); return one.naturalWidth; }") == 256
    assert "Seed 7" in await answer.inner_text()
    async with page.tab.expect_download() as saved:
        await answer.get_by_role("button", name="Save the picture").click()
    kept = Path(await (await saved.value).path()).read_bytes()
    assert kept == drawn.content
    # The first step lasts until it has been stopped.
    stopped = threading.Event()
    page.workers[PAINTER]._predictor.beat = stopped.wait
    await page.tab.get_by_label("num_steps").fill("20")
    await page.tab.get_by_role("button", name="Run").click()
    await page.tab.get_by_text(re.compile("^Step [01] of 20$")).wait_for()
    assert await page.accessible() == []
    await page.tab.get_by_role("button", name="Stop").click()
    while page.served.endings[-1] != ("text-to-image", "left"):
        await asyncio.sleep(0.02)
    stopped.set()

    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "node_modules").symlink_to(HERE / "node_modules")
    for (language, client), code in (await page.code(PAINTER)).items():
        if language == "JavaScript" and not runs_here(client):
            continue
        done = await asyncio.to_thread(run, language, code, folder, {"KEY": KEY})
        assert done.returncode == 0, (language, client, done.stdout, done.stderr)
        assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG"), (language, client)
        (folder / "picture.png").unlink()


@pytest.mark.slow  # some thirty programs
async def test_code_of_such_models_runs_as_it_is_pasted(page: Page, tmp_path: Path) -> None:
    """With files of the names that stand in it."""
    folder = tmp_path / "code"
    folder.mkdir()
    image, shape = draw_one(Random(3))
    (folder / "picture.png").write_bytes(png(image))
    (folder / "sound.wav").write_bytes(sound(2.0))
    (folder / "node_modules").symlink_to(HERE / "node_modules")
    wanted = {SHAPE: SHAPES[shape], TRANSLATION: "translated_text", SPEECH: "", VOICE: ""}
    for model, words in wanted.items():
        for (language, client), code in (await page.code(model)).items():
            if language == "JavaScript" and not runs_here(client):
                continue
            done = await asyncio.to_thread(run, language, code, folder, {"KEY": KEY})
            assert done.returncode == 0 and words in done.stdout, (language, client, done.stdout, done.stderr)
            assert '"errors": [{' not in done.stdout and '"error"' not in done.stdout
            if model == VOICE:
                # An MP3: its tag, or a frame of it.
                made = (folder / "speech.mp3").read_bytes()
                assert made[:3] == b"ID3" or made[0] == 0xFF, (language, client)
                (folder / "speech.mp3").unlink()
