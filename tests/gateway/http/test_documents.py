"""`tomarkdown` over HTTP: results in the order of the files, errors beside them, what is refused."""

from __future__ import annotations

import pytest

from serve_app.documents.convert import Converted, Converter, Crowded, installed
from tests.tasks.conftest import ACCOUNT, serve  # noqa: F401

PATH = ACCOUNT + "/tomarkdown"


async def test_files_in_order(serve, monkeypatch):  # noqa: F811
    async def converted(self, name, media_type, data):
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
            raise Crowded

        monkeypatch.setattr(Converter, "convert", crowded)
        busy = await found.http.post(PATH, files=files)
        assert busy.status_code == 429 and busy.headers["retry-after"] == "5"


@pytest.mark.skipif(not installed(), reason="needs markitdown")
async def test_a_real_one(serve):  # noqa: F811
    async with serve() as found:
        files = [("files", ("a.html", b"<h1>Title</h1><p>text</p>", "text/html"))]
        [told] = (await found.http.post(PATH, files=files)).json()["result"]
        assert told["data"].strip() == "# Title\n\ntext"
