"""Bound applications by name, for ``serve build``, which takes no builders.

::

    serve build serve_app.bound:gateway serve_app.bound:cf__pico__pico_instruct -o applications.yaml

The names are those of the profile's applications (``serve-app config PROFILE`` shows them) with ``_`` for ``-`` and
``.``.
"""

from __future__ import annotations

from ray.serve import Application

from serve_app.app import applications
from serve_app.catalog.load import load_catalog
from serve_app.config import load_settings


def __getattr__(name: str) -> Application:
    if name.startswith("__"):
        raise AttributeError(name)
    settings = load_settings()
    built = applications(settings, load_catalog(settings.home))
    known = {application.replace("-", "_").replace(".", "_"): application for application in built}
    if name not in known:
        raise AttributeError(
            f"no application {name!r} in the profile {settings.profile}; there are: {', '.join(known)}"
        )
    return built[known[name]]
