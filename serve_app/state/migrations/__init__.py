"""Versions of the schema. Each file in `versions` leads from one to the next; the newest is :data:`HEAD`."""

HEAD = "0022"
# Older versions whose programs can use the newest schema: during an upgrade, and after a step back. What has come since
# is new tables, and columns that may be left out; a migration that does more empties this. Programs of before 0022 do
# not look.
SERVES: tuple[str, ...] = ()
