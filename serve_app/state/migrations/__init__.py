"""Versions of the schema. Each file in `versions` leads from one to the next; the newest is :data:`HEAD`."""

HEAD = "0021"
