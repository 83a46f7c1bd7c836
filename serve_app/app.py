"""Builds the Serve applications from the catalogue: the whole DAG on one screen.

::

    application "gateway"            Gateway                      HTTP; finds the others by name
    application per model            Text -> Decode -> {Prefill, Draft}   text generation
                                     Embeddings | Reranker

``serve_app.app:gateway`` and ``serve_app.app:model`` are builders for ``serve run`` and ``serve deploy``
(``serve-app config`` writes the file); ``serve build`` takes bound applications, which :mod:`serve_app.bound` has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments import nursery
from deployments.autoscale import follow_plan
from deployments.decode import Decode
from deployments.draft import Draft
from deployments.encoders import Embeddings, Reranker
from deployments.gateway import Gateway
from deployments.prefill import Prefill
from deployments.root import Text
from serve_app.catalog.load import Catalog, load_catalog
from serve_app.catalog.records import Draft as DraftRecord
from serve_app.catalog.records import ModelRecord, Profile, Stage
from serve_app.config import Settings, api_key, cluster_secret, load_settings
from serve_app.gateway.models import application_name
from serve_app.gateway.settings import GatewaySettings
from serve_app.ray_private.hinted_router import HintedRequestRouter
from serve_app.state.accounts import hash_key
from serve_app.worker.spec import WorkerSpec

GATEWAY = "gateway"
# Serve passes this many requests to a replica; the engine queues them itself, where it can see their tokens.
MAX_ONGOING = 4096
# As in serve_app.ray_private.environment; Serve wants it in both places.
METRICS_INTERVAL_S = 2


def gateway_application(settings: Settings, replicas: tuple[int, int] | None = None) -> Application:
    """The only application with HTTP; of ``replicas``, at least and at most, by default as the profile has it."""
    least, most = replicas or (1, 1 if settings.profile == "local" else 16)
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
        rate_limits=settings.rate_limits,
        max_body_bytes=settings.max_body_bytes,
        max_embedding_body_bytes=settings.max_embedding_body_bytes,
        several_nodes=settings.profile != "local",
    )
    options = {"autoscaling_config": autoscaling, "max_ongoing_requests": MAX_ONGOING}
    return Gateway.options(**options, ray_actor_options={"num_cpus": 0.25}).bind(told)  # type: ignore[attr-defined]


def model_application(record: ModelRecord, profile: Profile, settings: Settings, source: Path) -> Application:
    """One model's deployments, each with its own replicas and autoscaling."""

    def spec(stage: str, **options: Any) -> WorkerSpec:
        return _worker_spec(record, profile, stage, settings, source, **options)

    stages = profile.stages
    if record.task == "text-embeddings":
        return _sized(Embeddings, stages["embeddings"]).bind(spec("embeddings"), stages["embeddings"].num_gpus)
    if record.task == "reranking":
        return _sized(Reranker, stages["reranker"]).bind(spec("reranker"), stages["reranker"].num_gpus)

    prefill = draft = None
    workers = engine_specs(record, profile, settings, source)
    if "prefill" in workers:
        prefill = _routed(Prefill, stages["prefill"]).bind(workers["prefill"], stages["prefill"].num_gpus)
    if "draft" in stages and (drafting := _drafting(record)) is not None:
        weights = drafting.weights.model_dump()
        draft = _sized(Draft, stages["draft"]).bind(spec("draft", weights=weights), stages["draft"].num_gpus)
    home = _routed(Decode, stages["decode"]).bind(
        workers["decode"], prefill, draft, stages["decode"].num_gpus, profile.min_remote_prefill_tokens
    )
    return Text.bind(home)  # type: ignore[attr-defined]


def _routed(deployment: Any, stage: Stage) -> Any:
    """:func:`_sized`, for a deployment whose replica the gateway may choose."""
    router = RequestRouterConfig(request_router_class=HintedRequestRouter)
    return _sized(deployment, stage, policy=AutoscalingPolicy(policy_function=follow_plan)).options(
        request_router_config=router
    )


def _drafting(record: ModelRecord) -> DraftRecord | None:
    """The record's draft, unless its speculation leaves it out."""
    return record.draft if record.speculation.draft and record.speculation.tokens else None


def _own_draft(record: ModelRecord, stage: str) -> dict[str, Any]:
    """What a worker is told that drafts for itself; prefill has to know an EAGLE-3 head, whose K/V are in the cache."""
    if record.draft is None or not record.draft.in_worker:
        return {}
    method = "eagle3" if record.draft.method == "eagle3" else "colocated"
    if stage == "prefill" and method != "eagle3":
        return {}
    return {"draft_method": method, "draft_weights": record.draft.weights.model_dump()}


def engine_specs(record: ModelRecord, profile: Profile, settings: Settings, source: Path) -> dict[str, WorkerSpec]:
    """What the engine workers of a text generation model are told, by stage."""
    stages = profile.stages
    own = _own_draft(record, "decode")
    said, drafting = record.speculation, _drafting(record)
    drafts = min(drafting.tokens, said.tokens) if drafting is not None and ("draft" in stages or own) else 0
    proposers = {"speculate_tokens": said.tokens, "ngram": said.ngram, "recent": said.recent, "draft_tokens": drafts}
    options: dict[str, dict[str, Any]] = {
        "decode": {"publish": True, **proposers, **own},
        "prefill": {"publish": True, **_own_draft(record, "prefill")},
    }
    return {
        stage: _worker_spec(record, profile, stage, settings, source, **told)
        for stage, told in options.items()
        if stage in stages
    }


def plant_workers(settings: Settings, catalog: Catalog) -> list[Any]:
    """Starts the engine workers that every start needs, before Serve is up; they live as long as what is returned."""
    if not nursery.available():
        return []
    specs = [
        spec
        for record, profile in _in_order(settings, catalog)
        if record.task == "text-generation"
        for stage, spec in engine_specs(record, profile, settings, catalog.source(record.id)).items()
        if profile.stages[stage].min_replicas and not profile.stages[stage].num_gpus
    ]
    return nursery.plant(specs)


def _sized(deployment: Any, stage: Stage, **autoscale: Any) -> Any:
    """A deployment with the resources and the autoscaling that the catalogue gives its stage."""
    autoscaling = AutoscalingConfig(
        min_replicas=stage.min_replicas,
        initial_replicas=stage.min_replicas,
        max_replicas=stage.max_replicas,
        target_ongoing_requests=stage.target_ongoing_requests,
        upscale_delay_s=stage.upscale_delay_s,
        downscale_delay_s=stage.downscale_delay_s,
        look_back_period_s=5,
        metrics_interval_s=METRICS_INTERVAL_S,
        **autoscale,
    )
    options: dict[str, Any] = {
        "autoscaling_config": autoscaling,
        "max_ongoing_requests": MAX_ONGOING,
        "health_check_period_s": 5,
        "health_check_timeout_s": 20,
        "ray_actor_options": {"num_cpus": stage.num_cpus},
    }
    if not stage.num_gpus:
        # An upgrade starts the new replicas before the old ones leave. GPUs are mostly taken: there, one after another.
        options["max_surge_percent"] = 100
    else:
        # The replica takes the CPUs, its engine worker (a child actor, hence in the same group) the GPU.
        options["placement_group_bundles"] = [{"CPU": stage.num_cpus, "GPU": stage.num_gpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    return deployment.options(**options)


def _worker_spec(
    record: ModelRecord, profile: Profile, stage: str, settings: Settings, source: Path, **options: Any
) -> WorkerSpec:
    size = profile.stages[stage]
    fields: dict[str, Any] = {
        "model": record.id,
        "stage": stage,
        "weights": record.weights.model_dump(),
        "source": str(source),
        "home": str(settings.home),
        "dtype": record.dtype,
        "quantization": record.quantization if stage in ("decode", "prefill") else "none",
        "kv_cache_dtype": record.kv_cache_dtype if stage in ("decode", "prefill") else "auto",
        "device": "cuda" if size.num_gpus else "cpu",
        "cpu_threads": size.cpu_threads,
        "kv_cache_bytes": size.kv_cache_bytes or 0,
        "gpu_share": size.gpu_memory_utilization * min(1.0, size.num_gpus or 1.0),
        "max_batch_tokens": size.max_batch_tokens,
        "max_num_seqs": size.max_num_seqs,
        "max_model_len": record.properties.context_window or 0,
        "several_nodes": settings.profile != "local",
        "kv_disk_dir": str(settings.kv_disk_dir or ""),
        "kv_disk_bytes": settings.kv_disk_bytes,
        "kv_guaranteed": settings.kv_guaranteed,
        **options,
    }
    return WorkerSpec(**fields)


def applications(settings: Settings, catalog: Catalog) -> dict[str, Application]:
    """All applications of the profile by name, in the order in which they should be deployed."""
    built = {GATEWAY: gateway_application(settings)}
    for record, profile in _in_order(settings, catalog):
        built[application_name(record.id)] = model_application(record, profile, settings, catalog.source(record.id))
    return built


def urgent(settings: Settings, catalog: Catalog) -> set[str]:
    """Applications to start before the others on a small machine, where loading all at once makes everything late."""
    return {GATEWAY, *(application_name(r.id) for r, _ in _in_order(settings, catalog) if r.task == "text-generation")}


def _in_order(settings: Settings, catalog: Catalog) -> list[tuple[ModelRecord, Profile]]:
    # Text generation first: it takes longest to load and is what most people come for.
    started = catalog.started(settings.profile, settings.models)
    return sorted(started, key=lambda pair: pair[0].task != "text-generation")


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
    catalog = load_catalog(settings.home)
    [(record, profile)] = catalog.started(settings.profile, [told.model or ""])
    return model_application(record, profile, settings, catalog.source(record.id))
