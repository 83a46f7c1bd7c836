"""Builds the Serve applications from the catalogue.

::

    application "gateway"            Gateway -> Batch             HTTP; finds the others by name; runs batches
    application per model            Text -> Decode -> {Prefill, Draft}, or Embeddings, or Reranker: what
                                     `deployments/STAGE.py` binds for the stage that the task's requests are sent to

``serve_app.app:gateway`` and ``serve_app.app:model`` are builders for ``serve run`` and ``serve deploy``
(``serve-app config`` writes the file); ``serve build`` takes bound applications, which :mod:`serve_app.bound` has.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from deployments import nursery
from deployments.batch import Batch
from deployments.blueprint import MAX_ONGOING, METRICS_INTERVAL_S, Blueprint
from deployments.gateway import Gateway
from deployments.model import home, model_application
from serve_app.catalog.load import Catalog, load_catalog
from serve_app.catalog.records import ModelRecord, Profile
from serve_app.config import ConfigError, Settings, alert_secret, api_key, cluster_secret, load_settings
from serve_app.gateway.settings import GatewaySettings, Listed
from serve_app.setting_values import neighbour_keys
from serve_app.state.callers.accounts import hash_key
from serve_app.state.check import read_operated
from serve_app.tasks.model import application_name

GATEWAY = "gateway"


def gateway_application(settings: Settings, replicas: tuple[int, int] | None = None) -> Application:
    """The only application with HTTP; of ``replicas``, at least and at most, by default as the profile has it."""
    least, most = replicas or (settings.gateways, max(settings.gateways, 1 if settings.profile == "local" else 16))
    autoscaling = AutoscalingConfig(
        min_replicas=least,
        initial_replicas=least,
        max_replicas=most,
        target_ongoing_requests=256,
        upscale_delay_s=2,
        downscale_delay_s=300,
        look_back_period_s=5,
        metrics_interval_s=METRICS_INTERVAL_S,
    )
    told = GatewaySettings(
        account=settings.account_id,
        key_hashes=(hash_key(api_key(settings)),),
        cluster_secret=cluster_secret(settings).hex(),
        home=str(settings.home),
        profile=settings.profile,
        models=settings.models,
        max_inflight=settings.max_inflight,
        memory_budget=settings.memory_budget or 0,
        rate_limits=settings.rate_limits,
        cors_origins=settings.cors_origins,
        metrics_open=settings.metrics_open,
        max_body_bytes=settings.max_body_bytes,
        max_embedding_body_bytes=settings.max_embedding_body_bytes,
        max_media_body_bytes=settings.max_media_body_bytes,
        database=settings.database,
        files=settings.files,
        prices=None if settings.prices is None else str(settings.prices.expanduser().resolve()),
        ledger_days=settings.ledger_days,
        give_away=settings.ledger_full == "serve",
        ledger_fsync=settings.ledger_fsync,
        batch_max_requests=settings.batch_max_requests,
        lora_adapters=settings.lora_adapters,
        lora_file_bytes=settings.lora_file_bytes,
        batch_file_bytes=settings.batch_file_bytes,
        batch_hours=settings.batch_hours,
        resume_max_s=settings.resume_max_s,
        resume_bytes=settings.resume_bytes,
        plan=settings.plan,
        store_away_s=settings.store_away_s,
        alert_url=settings.alert_url,
        alert_secret=alert_secret(settings) if settings.alert_url else "",
        alert_private=settings.alert_private,
        alert_shares=settings.alert_shares,
        batch_keep_s=settings.batch_keep_days * 86_400,
        batch_max_left=settings.batch_max_left,
        webhook_private=settings.webhook_private,
        several_nodes=settings.several_nodes,
        neighbours=_neighbours(settings),
        peers=settings.peers,
    )
    options = {"autoscaling_config": autoscaling, "max_ongoing_requests": MAX_ONGOING}
    if settings.several_nodes:
        # A gateway that leaves holds connections of clients, which nobody can take over; Serve's default is 20 s. One
        # machine goes down as a whole.
        options["graceful_shutdown_timeout_s"] = settings.request_timeout_s
    gateway = Gateway.options(**options, ray_actor_options={"num_cpus": 0.25})  # type: ignore[attr-defined]
    # A runner bounds its requests itself, by what workers have room for.
    # What deploys models needs nothing secret of them.
    plain = settings.model_copy(update=dict.fromkeys(("api_key", "alert_secret", "database")))
    return gateway.bind(told, _runners(settings).bind(replace(told, max_inflight=MAX_ONGOING, neighbours=())), plain)


def _neighbours(settings: Settings) -> tuple[Listed, ...]:
    """Other clusters with their keys. Raises `ConfigError`."""
    try:
        found = neighbour_keys(settings.neighbours, settings.home, os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(Listed(*each) for each in found)


def _runners(settings: Settings) -> Any:
    """None while there is nothing to do; then one for each gateway that says there is, within the bound."""
    autoscaling = AutoscalingConfig(
        min_replicas=0,
        initial_replicas=0,
        max_replicas=settings.batch_runners or (1 if settings.profile == "local" else 16),
        target_ongoing_requests=1,
        upscale_delay_s=0,
        downscale_delay_s=30,
        look_back_period_s=METRICS_INTERVAL_S + 0.5,
        metrics_interval_s=METRICS_INTERVAL_S,
    )
    options = {"autoscaling_config": autoscaling, "max_ongoing_requests": MAX_ONGOING}
    return Batch.options(**options, ray_actor_options={"num_cpus": 0})  # type: ignore[attr-defined]


def plant_workers(settings: Settings, catalog: Catalog) -> list[Any]:
    """Starts the engine workers that every start needs, before Serve is up; they live as long as what is returned."""
    if settings.memory_budget or not nursery.available():  # with a budget workers ask for room before they start
        return []
    models = [Blueprint(r, profile, settings, catalog.source(r.id)) for r, profile in _in_order(settings, catalog)]
    specs = [
        spec
        for model in models
        for spec in getattr(home(model.record), "engine_specs", lambda _: {})(model).values()
        if model.profile.stages[spec.stage].min_replicas and not model.profile.stages[spec.stage].num_gpus
    ]
    return nursery.plant(specs)


def applications(settings: Settings, catalog: Catalog) -> dict[str, Application]:
    """All applications of the profile by name, in the order in which they should be deployed."""
    built = {GATEWAY: gateway_application(settings)}
    for record, profile in _in_order(settings, catalog):
        built[application_name(record.id)] = model_application(record, profile, settings, catalog.source(record.id))
    return built


def urgent(settings: Settings, catalog: Catalog) -> set[str]:
    """Applications to start before the others on a small machine, where loading all at once makes everything late."""
    first = (record for record, _ in _in_order(settings, catalog) if record.task_declaration.starts_first)
    return {GATEWAY, *(application_name(record.id) for record in first)}


def _in_order(settings: Settings, catalog: Catalog) -> list[tuple[ModelRecord, Profile]]:
    started = catalog.started(settings.profile, settings.models)
    return sorted(started, key=lambda pair: not pair[0].task_declaration.starts_first)


class BuilderArgs(BaseModel):
    """Arguments of the builders. Everything else comes from the environment and $SERVE_APP_HOME."""

    model_config = ConfigDict(extra="forbid")

    profile: str | None = None
    model: str | None = None


# Ray looks at the annotation itself, which is text here, so the builders take the plain dict and check it themselves.
def gateway(args: dict[str, Any]) -> Application:
    """Builder of the gateway application."""
    return gateway_application(load_settings(profile=BuilderArgs.model_validate(args).profile))


def model(args: dict[str, Any]) -> Application:
    """Builder of one model's application; ``args["model"]`` is its catalogue id."""
    told = BuilderArgs.model_validate(args)
    settings = load_settings(profile=told.profile)
    catalog = load_catalog(settings.home, operated=read_operated(settings.home, settings.database))
    if told.model not in catalog:
        catalog.started(settings.profile, [told.model or ""])  # says what is wrong
    record, profile = catalog.startable(told.model or "", settings.profile)
    return model_application(record, profile, settings, catalog.source(record.id))
