"""`tomarkdown` over HTTP: results in the order of the files, errors beside them, what is refused."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.documents.convert import Converted, Converter, installed
from serve_app.gateway.http.routes.dialects import documents
from serve_app.media.preparing import Full
from tests.tasks.conftest import ACCOUNT, serve  # noqa: F401
from tests.waiting import until

PATH = ACCOUNT + "/tomarkdown"


async def test_files_in_order(serve, monkeypatch):  # noqa: F811
    async def converted(self, account, name, media_type, data):
        return Converted(error="it is damaged") if name == "bad.pdf" else Converted(f"# {name}\n" + data.decode())

    async with serve() as found:
        listed = (await found.http.get(PATH + "/supported")).json()["result"]
        assert ({"extension": ".pdf", "mimeType": "application/pdf"} in listed) == installed()
        monkeypatch.setattr(Converter, "convert", converted)
        files = [("files", ("a.md", b"text", "text/markdown")), ("files", ("bad.pdf", b"x", "application/pdf"))]
        told = (await found.http.post(PATH, files=files, data={"conversionOptions": "{}"})).json()["result"]
        assert told[0] == {
            "id": "0", "name": "a.md", "mimeType": "text/markdown", "format": "markdown", "tokens": 3,
            "data": "# a.md\ntext",
        }  # fmt: skip
        assert told[1]["format"] == "error" and told[1]["error"] == "It is damaged." and "data" not in told[1]
        for more in ({"files": []}, {"files": files * 11}, {"files": files, "data": {"conversionOptions": "no"}}):
            refused = await found.http.post(PATH, **(more if more["files"] else {"data": {"x": "y"}}))
            assert refused.status_code == 400

        async def crowded(self, *_):
            raise Full

        monkeypatch.setattr(Converter, "convert", crowded)
        busy = await found.http.post(PATH, files=files)
        assert busy.status_code == 429 and busy.headers["retry-after"] == "5"


async def test_what_no_answer_can_hold(serve, monkeypatch):  # noqa: F811
    """Names that are no text, and more Markdown together than an answer has."""

    async def converted(self, account, name, media_type, data):
        assert account == "local"
        return Converted(data.decode())

    monkeypatch.setattr(documents, "MAX_CHARS", 10)
    async with serve() as found:
        head = b'Content-Disposition: form-data; name="files"; filename="a\xff\xed\xa0\x80\0.exe"'
        unknown = b"--x\r\n" + head + b"\r\nContent-Type: application/x-none\r\n\r\nhi\r\n--x--\r\n"
        kind = {"content-type": "multipart/form-data; boundary=x"}
        answer = await found.http.post(PATH, content=unknown, headers=kind)
        assert answer.status_code == 200 and "format is not known" in answer.text, answer.text
        monkeypatch.setattr(Converter, "convert", converted)
        files = [("files", (f"{n}.md", b"123456", "text/markdown")) for n in range(2)]
        one, other = (await found.http.post(PATH, files=files)).json()["result"]
        assert one["data"] == "123456" and "more than 10 characters" in other["error"]
        assert "data" not in other and "tokens" not in other


async def test_what_is_refused_has_nothing_converted(serve, monkeypatch):  # noqa: F811
    ended = []

    async def converted(self, account, name, media_type, data):
        if name == "full.md":
            raise Full
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    monkeypatch.setattr(Converter, "convert", converted)
    async with serve() as found:
        files = [("files", (name, b"x", "text/markdown")) for name in ("a.md", "full.md", "b.md")]
        assert (await found.http.post(PATH, files=files)).status_code == 429
        await until(lambda: "a.md" in ended)


@pytest.mark.skipif(not installed(), reason="needs markitdown")
async def test_a_real_one(serve):  # noqa: F811
    async with serve() as found:
        files = [("files", ("a.html", b"<h1>Title</h1><p>text</p>", "text/html"))]
        [told] = (await found.http.post(PATH, files=files)).json()["result"]
        assert told["data"].strip() == "# Title\n\ntext"
