"""Serve's deployments and their actors."""

import logging

# Serve sends a replica's stderr to its log. Python tells of a log that cannot be written, as on a full disk, on stderr:
# in that log again, and so on, while the event loop stands still.
logging.raiseExceptions = False
