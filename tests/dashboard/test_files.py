"""The page's files as a browser gets them."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from serve_app.api.errors import NoRoute
from serve_app.dashboard.files import SECURITY, Files, read

PAGE = b'<!doctype html><script type="module" src="/dashboard/static/{version}/app.js"></script>'
SCRIPT = b"const x = 1;\n" * 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "static" / "pages").mkdir(parents=True)
    for name, body in (("index.html", PAGE), ("app.js", SCRIPT), ("pages/a.mjs", b"1"), ("secret.py", b"x = 1")):
        (tmp_path / "static" / name).write_bytes(body)
    (tmp_path / "outside.js").write_bytes(b"outside")
    return tmp_path / "static"


@pytest.fixture
def http(folder: Path) -> httpx.AsyncClient:
    files = Files(folder)
    routes = [Route("/dashboard", files.index), Route("/dashboard/static/{version}/{path:path}", files.file)]

    async def missing(*_: object) -> Response:
        return Response(status_code=404)

    app = Starlette(routes=routes, exception_handlers={NoRoute: missing})
    app.router.redirect_slashes = False
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


async def test_files_are_packed_kept_by_version_and_guarded(http, folder):
    page = await http.get("/dashboard")
    version, _ = read(folder)
    assert f"/dashboard/static/{version}/app.js" in page.text and page.headers["cache-control"] == "no-cache"
    script = await http.get(f"/dashboard/static/{version}/app.js")
    assert script.content == SCRIPT and script.headers["content-encoding"] == "gzip"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in script.headers["cache-control"]
    plain = await http.get(f"/dashboard/static/{version}/app.js", headers={"Accept-Encoding": "identity"})
    assert plain.content == SCRIPT and "content-encoding" not in plain.headers
    again = await http.get("/dashboard", headers={"If-None-Match": page.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    # A page from before an upgrade gets what there is, and keeps it not.
    old = await http.get("/dashboard/static/0123456789abcdef/app.js")
    assert old.content == SCRIPT and old.headers["cache-control"] == "no-cache"
    for answer in (page, script, again):
        assert {name: answer.headers[name] for name in SECURITY} == SECURITY
    assert (
        "'unsafe" not in SECURITY["Content-Security-Policy"]
        and "default-src 'none'" in page.headers["content-security-policy"]
    )


async def test_nothing_else_is_served(http):
    escapes = ("../outside.js", "..%2Foutside.js", "%2e%2e/outside.js", "/etc/passwd")
    for path in ("secret.py", "", "pages", "nothing.js", *escapes):
        assert (await http.get(f"/dashboard/static/x/{path}")).status_code == 404, path


def test_the_version_is_that_of_all_content(folder):
    before, files = read(folder)
    assert gzip.decompress(files["app.js"].packed or b"") == SCRIPT and files["pages/a.mjs"].packed is None
    (folder / "pages" / "a.mjs").write_bytes(b"2")
    assert read(folder)[0] != before
