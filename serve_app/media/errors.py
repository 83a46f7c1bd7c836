"""The one error of decoding."""

from __future__ import annotations


class BadFile(ValueError):
    """A file that cannot be decoded; the text says why, and what to send."""
