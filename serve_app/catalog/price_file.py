"""The operator's price list on disk: read when a gateway starts, and again whenever it has changed.

A change is read once the file has stayed as it is from one look to the next, since editors and copies write a file in
pieces. One that is wrong is refused, and the list before it goes on. A copy of the list in use lies beside the run's
files, so that a gateway that starts meanwhile charges the same prices as the others.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.price_list import FILE, PriceList, read_price_list

log = logging.getLogger("ray.serve")

_KEPT = Path("run") / FILE
# Of a file: when it was changed, its size and its inode; None: it is not there.
_Mark = tuple[int, int, int] | None


class PriceFile:
    """``listed``: the file, which must be there; None: `home`/prices.yaml, where it is. ``problem``: why the file as it
    is now is refused, "" if it is in use.
    """

    def __init__(self, home: Path, listed: Path | None = None) -> None:
        self.path = home / FILE if listed is None else listed.expanduser()
        self._named = listed is not None
        self._kept = home / _KEPT
        self._taken = self._seen = self._mark()
        self.problem = ""

    def begin(self) -> PriceList:
        """The list as a gateway starts; the one in use where the file is wrong. Raises CatalogError without one."""
        try:
            found = self.read()
        except CatalogError as error:
            try:
                found = read_price_list(self._kept)
            except CatalogError:
                raise error from None
            self._refuse(error)
            return found
        self._keep()
        return found

    def changed(self) -> bool:
        """Whether the file is another one than was last read, and at rest. To be asked again and again."""
        before, self._seen = self._seen, self._mark()
        return self._seen == before != self._taken

    def take(self) -> PriceList | None:
        """The list as it is now; None where it is refused, or just being written."""
        mark = self._mark()
        try:
            found = self.read()
        except CatalogError as error:
            self._taken = mark
            self._refuse(error)
            return None
        if self._mark() != mark:
            return None
        self._taken, self.problem = mark, ""
        self._keep()
        there = f"{self.path} has changed" if mark else f"{self.path} has gone: the catalogue's prices hold"
        log.warning("%s; it was taken over (%d prices, %s)", there, len(found.prices), found.currency)
        return found

    def read(self) -> PriceList:
        """The list as it is now. Raises CatalogError."""
        return PriceList() if self._mark() is None and not self._named else read_price_list(self.path)

    def _refuse(self, error: CatalogError) -> None:
        self.problem = str(error)
        log.error("the price list is refused, and the one before it goes on: %s", error)

    def _keep(self) -> None:
        """For gateways that start later; without it they refuse to start on a list that is wrong."""
        new = self._kept.with_name(f".{FILE}.{os.getpid()}")
        with suppress(OSError):
            if self._mark() is None:
                self._kept.unlink(missing_ok=True)
                return
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path, new)
            new.replace(self._kept)

    def _mark(self) -> _Mark:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
