"""The Serve config of a profile, rendered from the catalogue: what ``serve deploy`` takes on a cluster.

``serve-app config PROFILE`` prints it; ``serve_config/`` holds the output for the catalogue that ships, and a test
keeps them equal.
"""

from __future__ import annotations

from typing import Any

import yaml

from serve_app.catalog.load import Catalog
from serve_app.config import Settings
from serve_app.tasks.model import application_name


class _Plain(yaml.SafeDumper):
    """Without anchors: each application can be changed by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_HEADER = """\
# Made by `serve-app config {profile}`; do not edit, make it again. Deploy with `serve deploy`, see docs/operations.md.
# It holds no key: the builders read $SERVE_APP_HOME on the head node and the environment of Ray there.
"""


def deploy_config(settings: Settings, catalog: Catalog, code: str | None = None) -> dict[str, Any]:
    """The config of ``settings.profile``: the gateway, and one application for each model the profile starts.

    Where ``settings.models`` names some models, the gateway is told so as well, or it would wait for the others.
    ``code``: a folder on every node, whose project the applications run instead of the installed one.
    """
    profile = settings.profile
    gateway: dict[str, Any] = {
        "name": "gateway",
        "route_prefix": "/",
        "import_path": "serve_app.app:gateway",
        "args": {"profile": profile},
    }
    runs = {"PYTHONPATH": code} if code else {}
    told = {"SERVE_APP_MODELS": ",".join(settings.models)} if settings.models else {}
    if told or runs:
        gateway["runtime_env"] = {"env_vars": told | runs}
    models = [
        {
            "name": application_name(record.id),
            # Only the gateway has HTTP. Left out, Serve would give every application the route /.
            "route_prefix": None,
            "import_path": "serve_app.app:model",
            "args": {"profile": profile, "model": record.id},
            **({"runtime_env": {"env_vars": runs}} if runs else {}),
        }
        for record, _ in catalog.started(profile, settings.models)
    ]
    return {
        # HAProxy on every node that has replicas and on the head, which always has one.
        "proxy_location": "EveryNode",
        "http_options": {
            # On a cluster it is the security group that decides who reaches the port.
            "host": "0.0.0.0" if profile == "gpu" and settings.is_loopback else settings.host,
            "port": settings.port,
            "request_timeout_s": settings.request_timeout_s,
        },
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [gateway, *models],
    }


def render(settings: Settings, catalog: Catalog, code: str | None = None) -> str:
    """:func:`deploy_config` as YAML."""
    body = yaml.dump(deploy_config(settings, catalog, code), Dumper=_Plain, sort_keys=False, width=120)
    return _HEADER.format(profile=settings.profile) + body
