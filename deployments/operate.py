"""Starts, scales and ends models' applications by Serve's own calls, for the gateway that an operator asks."""

from __future__ import annotations

from ray import serve

from deployments.model import model_application
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.config import Settings
from serve_app.gateway.operate import Source
from serve_app.ray_private.versions import running_versions
from serve_app.tasks.model import application_name


class Applications:
    """:class:`serve_app.gateway.operate.Deployer`. Its calls block until Serve knows, and not until it is done."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def deploy(self, record: ModelRecord, profile: Profile, source: Source, *, keep: bool) -> None:
        name = application_name(record.id)
        versions = running_versions(name) if keep else {}
        built = model_application(record, profile, self._settings, source, versions)
        serve.run_many(
            [serve.RunTarget(target=built, name=name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def end(self, model: str) -> None:
        serve.delete(application_name(model), _blocking=False)
