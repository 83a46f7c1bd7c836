"""The documents that can be converted, and what a file may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Format:
    """``converter``: markitdown's class; ``zipped``: whether the file is a ZIP archive of XML."""

    extension: str
    media_type: str
    converter: str
    zipped: bool = False


_OFFICE = "application/vnd.openxmlformats-officedocument"
FORMATS = (
    Format(".pdf", "application/pdf", "PdfConverter"),
    Format(".docx", f"{_OFFICE}.wordprocessingml.document", "DocxConverter", zipped=True),
    Format(".xlsx", f"{_OFFICE}.spreadsheetml.sheet", "XlsxConverter", zipped=True),
    Format(".pptx", f"{_OFFICE}.presentationml.presentation", "PptxConverter", zipped=True),
    Format(".html", "text/html", "HtmlConverter"),
    Format(".htm", "text/html", "HtmlConverter"),
    Format(".csv", "text/csv", "CsvConverter"),
    Format(".epub", "application/epub+zip", "EpubConverter", zipped=True),
    Format(".json", "application/json", "PlainTextConverter"),
    Format(".xml", "application/xml", "PlainTextConverter"),
    Format(".md", "text/markdown", "PlainTextConverter"),
    Format(".txt", "text/plain", "PlainTextConverter"),
)
# Bytes that an archive's files have together at most, how many there may be, and how much smaller packing makes them.
MAX_UNPACKED = 256 << 20
MAX_ENTRIES = 10_000
MAX_RATIO = 200
# Characters of what comes out of a document, and of all documents of a request.
MAX_CHARS = 10_000_000
# What the process writes first: whether Markdown follows, or why there is none.
TEXT, ERROR = b"T", b"E"
# Of the process: bytes of its address space, of files that it writes, seconds of a processor, and seconds in all.
MEMORY_BYTES = 3 << 30
FILE_BYTES = 64 << 20
CPU_S = 60
SECONDS = 90.0


def format_of(name: str, media_type: str) -> Format | None:
    """By the file's name, else by what its sender says it is."""
    lower = name.lower()
    for known in FORMATS:
        if lower.endswith(known.extension):
            return known
    label = media_type.partition(";")[0].strip().lower()
    return next((known for known in FORMATS if known.media_type == label), None)
