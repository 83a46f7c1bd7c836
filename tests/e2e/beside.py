"""A model and a gateway of its own on the running stack's Serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from ray import serve

from deployments.model import model_application
from serve_app.app import gateway_application
from serve_app.catalog.load import load_catalog
from serve_app.config import Settings, api_key
from serve_app.tasks.model import application_name


@contextmanager
def served_beside(url: str, settings: Settings, model: str, name: str) -> Iterator[httpx.Client]:
    """A client of the gateway application ``name``, which knows the models of ``settings``; ``model`` is deployed and
    not waited for.
    """
    catalog = load_catalog(settings.home)
    record = catalog[model]
    bound = model_application(record, record.serving["local"], settings, catalog.source(model))
    targets = [
        serve.RunTarget(target=bound, name=application_name(model), route_prefix=None),
        serve.RunTarget(target=gateway_application(settings, replicas=(1, 1)), name=name, route_prefix=f"/{name}"),
    ]
    serve.run_many(targets, wait_for_applications_running=False)
    try:
        headers = {"Authorization": f"Bearer {api_key(settings)}"}
        with httpx.Client(base_url=f"{url}/{name}", headers=headers, timeout=120) as client:
            yield client
    finally:
        for application in (name, application_name(model)):
            serve.delete(application, _blocking=False)
