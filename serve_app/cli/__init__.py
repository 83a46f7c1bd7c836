"""``serve-app``: a file for each command, or group of commands. :func:`main` is the program."""

from serve_app.cli.program import main

__all__ = ["main"]
