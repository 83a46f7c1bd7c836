"""The page's files: read once, packed once, and named by their content so that browsers keep them for good."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import NoRoute
from serve_app.dashboard.modules import by_page

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"
# What the page's text has where the version of its files belongs, and the modules of its pages as JSON.
VERSION, MODULES = b"{version}", b"{modules}"
# Sheets in the order in which the page reads them; they go out as one file.
STYLE = "style.css"
SHEETS = ("vendor/uPlot.min", "css/theme", "css/base", "css/layout", "css/controls", "css/data", "css/playground")
_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
SECURITY = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=()",
}
_YEAR_S = 365 * 86_400


@dataclass(slots=True, frozen=True)
class File:
    """``packed``: as gzip, None where that is no smaller."""

    body: bytes
    packed: bytes | None
    media: str
    etag: str


class Files:
    """Those below ``folder``, read when the first is asked for."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._found: dict[str, File] | None = None
        self._reading = asyncio.Lock()
        self.version = ""

    async def index(self, request: Request) -> Response:
        """The page, which is asked for each time."""
        return await self._answer(request, INDEX, "no-cache")

    async def file(self, request: Request) -> Response:
        """One of the current files: under another version, that of a page from before an upgrade, it is not kept."""
        await self._read()
        current = request.path_params["version"] == self.version
        kept = f"public, max-age={_YEAR_S}, immutable" if current else "no-cache"
        return await self._answer(request, request.path_params["path"], kept)

    async def _answer(self, request: Request, name: str, kept: str) -> Response:
        file = (await self._read()).get(name)
        if file is None:
            raise NoRoute(request.method, request.url.path)
        headers = {**SECURITY, "Cache-Control": kept, "ETag": file.etag, "Vary": "Accept-Encoding"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = file.body
        if file.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["Content-Encoding"] = file.packed, "gzip"
        return Response(body, headers={**headers, "Content-Type": file.media})

    async def _read(self) -> dict[str, File]:
        async with self._reading:
            if self._found is None:
                self.version, self._found = await asyncio.to_thread(read, self._folder)
        assert self._found is not None
        return self._found


def read(folder: Path) -> tuple[str, dict[str, File]]:
    """The version of all files of types that are served, and each of them by its path."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix in _MEDIA and p.is_file())
    bodies = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    bodies[STYLE] = b"\n".join(bodies.get(f"{sheet}.css", b"") for sheet in SHEETS)
    whole = hashlib.sha256()
    for name, body in bodies.items():
        whole.update(b"%s %d\n" % (name.encode(), len(body)) + body)
    version = whole.hexdigest()[:16]
    if INDEX in bodies:
        modules = json.dumps(by_page(bodies), separators=(",", ":")).encode()
        bodies[INDEX] = bodies[INDEX].replace(MODULES, modules).replace(VERSION, version.encode())
    return version, {name: _file(name, body) for name, body in bodies.items()}


def _file(name: str, body: bytes) -> File:
    packed = gzip.compress(body, 9, mtime=0)
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return File(body, packed if len(packed) < len(body) else None, _MEDIA[Path(name).suffix], etag)
