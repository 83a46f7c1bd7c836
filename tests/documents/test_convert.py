"""Documents in their own process: what is refused, what it may do, and, where markitdown is, what comes out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from io import BytesIO

import pytest

from serve_app.documents import program
from serve_app.documents.convert import PROCESSES, WAITING, Converted, Converter, installed, supported
from serve_app.documents.formats import FORMATS, format_of
from serve_app.documents.program import Refused, check_archive, convert
from serve_app.media.decoder import Decoder
from serve_app.media.errors import BadFile
from serve_app.media.preparing import Full

WORDS = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def archive(**files: bytes) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(name.replace("__", "/").replace("_", "."), data)
    return out.getvalue()


def docx(text: str) -> bytes:
    types = (
        b'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        b'<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        b'<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
        b'wordprocessingml.document.main+xml"/></Types>'
    )
    relations = (
        b'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r1" '
        b'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
        b'Target="word/document.xml"/></Relationships>'
    )
    body = f'<w:document xmlns:w="{WORDS}"><w:body><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body></w:document>'
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("[Content_Types].xml", types)
        packed.writestr("_rels/.rels", relations)
        packed.writestr("word/document.xml", body)
    return out.getvalue()


def pdf(text: str) -> bytes:
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + b"xref\n0 6\n0000000000 65535 f \n%strailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        table, len(out),
    )  # fmt: skip


def test_formats_by_name_and_by_label():
    assert format_of("A.DOCX", "").extension == ".docx"
    assert format_of("report", "application/pdf; x=1").extension == ".pdf"
    assert format_of("report.exe", "application/octet-stream") is None
    assert supported() == ([(f.extension, f.media_type) for f in FORMATS] if installed() else [])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (archive(word__document_xml=b"\0" * 60_000_000), "unpacks to"),
        (archive(a_xml=b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>'), "declares entities"),
        (archive(a_xml='<!DOCTYPE x [<!ENTITY e "e">]><x>&e;</x>'.encode("utf-16")), "declares entities"),
        (docx("x")[:200], "damaged"),
        (b"no archive", "damaged"),
    ],
)
def test_hostile_archives_are_refused_before_anything_reads_them(data, words):
    with pytest.raises(Refused, match=words):
        check_archive(data)
    check_archive(docx("a good one"))


def test_the_process_has_no_network_no_files_and_bounds(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    code = (
        "import socket, resource, sys\nfrom serve_app.documents.program import restrict\nrestrict()\n"
        "for attempt in (lambda: socket.create_connection(('127.0.0.1', 9)), lambda: socket.getaddrinfo('x', 80),\n"
        "                lambda: socket.socket().connect(('127.0.0.1', 9))):\n"
        "    try:\n        attempt()\n    except OSError as error:\n        assert 'fetch nothing' in str(error)\n"
        "    else:\n        raise SystemExit('connected')\n"
        "for attempt in (lambda: open(sys.argv[1]), lambda: open(sys.argv[1], 'w'), lambda: open('/new', 'wb')):\n"
        "    try:\n        attempt()\n    except PermissionError as error:\n        assert 'no files' in str(error)\n"
        "    else:\n        raise SystemExit('opened')\n"
        "import plistlib\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[0] <= 3 << 30\nprint('held')"
    )
    assert subprocess.check_output([sys.executable, "-c", code, str(secret)], text=True) == "held\n"
    assert secret.read_text() == "x"


async def test_what_cannot_be_converted():
    converter = Converter()
    for name in ("a.exe", "a\0.exe", "\ud800", "-c", ""):
        unknown = await converter.convert("a", name, "application/octet-stream", b"MZ")
        assert "format is not known" in unknown.error and ".docx" in unknown.error
    slow = await Converter(seconds=0.0).convert("a", "a\0\ud800.txt", "text/plain\0", b"x")
    assert "within 0 seconds" in slow.error


class Held(Converter):
    """Each document takes until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.on = asyncio.Event()
        self.begun: list[str] = []

    async def _converted(self, name: str, media_type: str, data: bytes) -> Converted:
        self.begun.append(name)
        await self.on.wait()
        return Converted(name)


async def test_accounts_take_turns_and_each_has_its_share_of_what_waits():
    converter = Held()
    flood = [asyncio.ensure_future(converter.convert("flood", f"f{n}", "", b"")) for n in range(PROCESSES + WAITING)]
    await asyncio.sleep(0)
    assert converter.begun == ["f0"]
    with pytest.raises(Full):
        await converter.convert("flood", "more", "", b"")
    other = [asyncio.ensure_future(converter.convert("other", f"o{n}", "", b"")) for n in range(2)]
    await asyncio.sleep(0)
    assert converter.begun == ["f0", "o0"]
    # Who leaves waits no more, and whoever is next begins.
    other[0].cancel()
    await asyncio.gather(other[0], return_exceptions=True)
    await asyncio.sleep(0)
    assert converter.begun == ["f0", "o0", "o1"]
    converter.on.set()
    assert [one.text for one in await asyncio.gather(*flood, other[1])][-2:] == [f"f{PROCESSES + WAITING - 1}", "o1"]
    assert not converter._here


def test_nothing_is_loaded_from_the_folder_that_it_is_started_in(tmp_path, monkeypatch):
    """Which may be one where others write, as the folder of all users' temporary files is."""
    for name in ("json", "zipfile", "markitdown"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    asyncio.run(Converter().convert("a", "a.docx", "", b"no archive"))
    with pytest.raises(BadFile):
        Decoder().size(b"no picture")
    assert not (tmp_path / "taken").exists()


def test_entities_are_found_wherever_they_are_declared():
    padding = b"<!--" + b"x" * (1 << 17) + b"-->"
    with pytest.raises(Refused, match="declares entities"):
        check_archive(archive(a_xml=padding + b'<!DOCTYPE x [<!ENTITY e "e">]><x>&e;</x>'))


def test_without_markitdown_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "markitdown", None)
    with pytest.raises(Refused, match=r"serve-app\[documents\]"):
        convert(b"text", format_of("a.txt", ""))


@pytest.mark.skipif(not installed(), reason="needs markitdown")
@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("a.txt", "Grüße".encode(), "Grüße"),
        ("a.html", b"<h1>Title</h1><p>Some <b>bold</b> text<script>x()</script></p>", "# Title\n\nSome **bold** text"),
        ("a.csv", b"a,b\n1,2\n", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        ("a.docx", docx("Hello from Word"), "Hello from Word"),
        ("a.pdf", pdf("Hello from a PDF"), "Hello from a PDF"),
    ],
)
def test_documents_become_markdown(name, data, wanted):
    assert program.convert(data, format_of(name, "")).strip() == wanted
    assert asyncio.run(Converter().convert("a", name, "", data)).text.strip() == wanted
