"""Drops what nobody needs any more: batches and files whose time is over, and blobs that belong to nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from serve_app.state.blobs.files import Files
from serve_app.state.blobs.uploads import UploadStore
from serve_app.state.deferred.batches import BatchStore, forget

log = logging.getLogger("ray.serve")

# How often blobs are looked for that belong to nothing. What belongs to nothing in two looks is of a process that has
# died between writing a blob and saying whose it is.
LOOK_S = 3600.0
_GROUP = 500


class Sweep:
    """Of one gateway. All calls block, and raise `Away` and `OSError`."""

    def __init__(self, batches: BatchStore, uploads: UploadStore, files: Callable[[], Files]) -> None:
        self._batches = batches
        self._uploads = uploads
        self._files = files
        self._looked_at = time.monotonic()
        self._lost: frozenset[str] = frozenset()
        self._looking: threading.Thread | None = None

    def turn(self, now: float, until: float) -> None:
        """``now``: unix seconds. ``until``: on the monotonic clock, where more is left to the next turn."""
        for batch in self._batches.old(now):
            forget(self._batches, self._files(), batch)
            if time.monotonic() > until:
                return
        for upload in self._uploads.old(now):
            self._files().delete(upload.blob)
            self._uploads.delete(upload.account, upload.id)
            if time.monotonic() > until:
                return
        if time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            # A list of everything takes its time.
            self._looking = threading.Thread(target=self._look, args=(now,), name="sweep", daemon=True)
            self._looking.start()

    def _look(self, now: float) -> None:
        try:
            self.look(now)
        except Exception as error:
            log.warning("blobs that belong to nothing were not looked for (%s)", error)

    def look(self, now: float) -> None:
        """Deletes what belonged to nothing the last time, and does not now either."""
        files, lost = self._files(), self._unknown()
        files.delete_drafts("files", now - LOOK_S)
        for name in lost & self._lost:
            if name.startswith("batches/"):
                files.delete_below(name)
            else:
                files.delete(name)
        self._lost = lost

    def _unknown(self) -> frozenset[str]:
        # Names first: what comes between is known.
        ids, blobs = self._files().below("batches"), self._files().below("files")
        found = {f"files/{name}" for name in blobs} - self._uploads.blobs()
        for start in range(0, len(ids), _GROUP):
            some = ids[start : start + _GROUP]
            found.update(f"batches/{name}" for name in set(some) - self._batches.known(some))
        return frozenset(found)
