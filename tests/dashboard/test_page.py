"""The page's files: what is vendored is what its table says, and nothing is inline or from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.dashboard.files import SHEETS, STYLE, read
from serve_app.dashboard.modules import by_page

STATIC = PROJECT_ROOT / "serve_app" / "dashboard" / "static"
VENDOR = STATIC / "vendor"
OWN = sorted(
    path for path in STATIC.rglob("*") if path.suffix in {".js", ".css", ".html"} and VENDOR not in path.parents
)
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
FIRST_PAGE_BYTES = 250_000


def name(path: Path) -> str:
    return str(path.relative_to(STATIC))


def imports(path: Path) -> tuple[set[Path], set[Path]]:
    """The modules that a module imports at once, and those that it fetches when they are asked for."""
    text = path.read_text()
    at_once = re.findall(r'(?m)^(?:import|export)\b[^;=]*?from "([^"]+)"|^import "([^"]+)"', text)
    later = re.findall(r'\bimport\("([^"]+)"\)', text)
    return {(path.parent / (one or other)).resolve() for one, other in at_once}, {
        (path.parent / one).resolve() for one in later
    }


def closure(path: Path) -> set[Path]:
    found: set[Path] = set()
    open_ends = [path.resolve()]
    while open_ends:
        if (one := open_ends.pop()) not in found:
            found.add(one)
            open_ends += imports(one)[0]
    return found


def test_vendored_files_are_those_of_the_table():
    table = json.loads((VENDOR / "vendored.json").read_text())
    for row in table:
        assert hashlib.sha256((VENDOR / row["file"]).read_bytes()).hexdigest() == row["sha256"], row["file"]
        if "changed" in row:
            ours, theirs = (VENDOR / row["file"]).read_text(), row["changed"]
            original = ours.replace(theirs[1], theirs[0]).encode()
            assert hashlib.sha256(original).hexdigest() == row["sha256_of_source"], row["file"]
        assert row["licence"] and row["version"] and row["source"]
        for licence in row["licence_files"]:
            assert len((VENDOR / "licences" / licence).read_text()) > 500, licence
    there = {path.name for path in VENDOR.iterdir() if path.is_file()} - {"vendored.json"}
    assert there == {row["file"] for row in table}
    told = {licence for row in table for licence in row["licence_files"]}
    assert {path.name for path in (VENDOR / "licences").iterdir()} == told


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_every_import_is_there(path):
    at_once, later = imports(path)
    for one in at_once | later:
        assert one.is_file(), f"{name(path)} imports {one}"


def of_index() -> set[Path]:
    """What the page names itself, and the sheets that its style is made of."""
    found = set(re.findall(r"/dashboard/static/\{version\}/([^\"]+)", (STATIC / "index.html").read_text()))
    return {STATIC / one for one in found - {STYLE}} | {STATIC / f"{sheet}.css" for sheet in SHEETS}


def test_no_file_is_left_over():
    reached = of_index()
    open_ends = [path for path in reached if path.suffix == ".js"]
    while open_ends:
        at_once, later = imports(open_ends.pop())
        open_ends += [path for path in at_once | later if path not in reached and path.is_relative_to(STATIC)]
        reached |= at_once | later
    assert {path for path in OWN if path.suffix != ".html"} - reached == set()


@pytest.mark.parametrize("page", sorted((STATIC / "js" / "pages").glob("*.js")), ids=name)
def test_a_first_page_is_small(page):
    """What a browser fetches before it shows a page, charts and the formatting of answers included."""
    files = of_index()
    for one in (STATIC / "js" / "main.js", page):
        for module in closure(one):
            files |= {module} | imports(module)[1]
    files = {path for path in files if path == page or "pages" not in path.parts}
    sizes = {path: len(gzip.compress(path.read_bytes(), 9)) for path in files | {STATIC / "index.html"}}
    assert sum(sizes.values()) <= FIRST_PAGE_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:5]


def test_nothing_is_inline():
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=", index)
    scripts = [tag for tag in re.findall(r"<script[^>]*>", index) if "application/json" not in tag]
    assert len(scripts) == 2 and all(re.match(r"<script (type=\"module\" )?src=", tag) for tag in scripts)


@pytest.mark.parametrize("page", sorted((STATIC / "js" / "pages").glob("*.js")), ids=name)
def test_a_page_is_told_all_modules_that_it_needs(page):
    told = by_page({one.relative_to(STATIC).as_posix(): one.read_bytes() for one in STATIC.rglob("*.*js")})
    assert {STATIC / one for one in told[""]} == closure(STATIC / "js" / "main.js")
    assert {STATIC / one for one in told[""] + told[page.stem]} == closure(STATIC / "js" / "main.js") | closure(page)


def test_the_page_has_what_is_put_into_it():
    version, files = read(STATIC)
    index = files["index.html"].body.decode()
    told = json.loads(re.search(r"application/json[^>]*>(.*?)</script>", index)[1])  # type: ignore[index]
    assert "js/pages/playground.js" in told["playground"] and set(told[""]) | set(told["usage"]) <= set(files)
    assert f"/dashboard/static/{version}/{STYLE}" in index and "{" not in index.replace(
        json.dumps(told, separators=(",", ":")), ""
    )
    assert all((STATIC / f"{sheet}.css").read_bytes() in files[STYLE].body for sheet in SHEETS)


@pytest.mark.parametrize("path", OWN, ids=name)
def test_own_files_are_short_and_stay_at_home(path):
    text = path.read_text()
    assert text.count("\n") < 400
    assert not re.search(r"@import|url\((?!data:)", text)
    elsewhere = set(re.findall(r"(?:https?|wss?)://[^\s\"'`<]+", text))
    assert elsewhere <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\beval\(|new Function|document\.write|insertAdjacentHTML|outerHTML|\.innerHTML", text)
    if "dangerouslySetInnerHTML" in text:
        assert path.name == "markdown.js"
