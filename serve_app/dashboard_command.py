"""``serve-app dashboard``: a link that opens the dashboard and signs in, once, with the key of the settings."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from serve_app.config import Settings, api_key, cluster_secret, load_settings
from serve_app.dashboard.code import make_code


def add_parser(commands: Any) -> None:
    dashboard = commands.add_parser("dashboard", help="print a link that signs in to the dashboard, once")
    dashboard.set_defaults(command=_dashboard)


def link(url: str, settings: Settings) -> str:
    """``url``: of the running server. What stands behind # is sent to no server by the browser itself."""
    from serve_app.state.callers.accounts import hash_key

    code = make_code(cluster_secret(settings).hex(), hash_key(api_key(settings)), time.time())
    return f"{url.replace('0.0.0.0', '127.0.0.1')}/dashboard#code={code}"


def _dashboard(arguments: argparse.Namespace) -> int:
    from serve_app.cluster import NotRunning, read_attachment

    settings = load_settings()
    try:
        print(link(read_attachment(settings.home).url, settings))
    except NotRunning as error:
        print(f"serve-app: {error}", file=sys.stderr)
        return 1
    return 0
