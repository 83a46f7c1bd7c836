"""What binds a model's deployments: its record, and the resources and autoscaling that each stage gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.autoscale import follow_plan
from deployments.bundles import bundles
from serve_app.catalog.records import ModelRecord, Profile, Stage
from serve_app.config import Settings
from serve_app.ray_private.hinted_router import HintedRequestRouter
from serve_app.ray_private.versions import of_version
from serve_app.worker.spec import WorkerSpec

# Serve passes this many requests to a replica; the engine queues them itself, where it can see their tokens.
MAX_ONGOING = 4096
# What Ray is told of a GPU that workers take turns with: who has it is for the node's memory broker to say.
SHARED_GPU = 0.01
# As in serve_app.ray_private.environment; Serve wants it in both places.
METRICS_INTERVAL_S = 2


@dataclass(slots=True, frozen=True)
class Blueprint:
    """One model that is to be served; ``source`` is the file of its record."""

    record: ModelRecord
    profile: Profile
    settings: Settings
    source: Path
    # Versions that deployments keep, by their names, so that replicas which run go on.
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def stages(self) -> dict[str, Stage]:
        return self.profile.stages

    def gpus(self, stage: str) -> float:
        """What Ray reserves of GPUs for each rank of the stage's workers."""
        size = self.stages[stage]
        return SHARED_GPU if self._turn(size) and not size.min_replicas else size.num_gpus

    def _turn(self, size: Stage) -> float:
        """The share of a GPU that a worker takes turns with. Of several GPUs of a node Ray chooses one and keeps the
        share for it, as without a budget.
        """
        return size.num_gpus if self.settings.memory_budget and size.ranks == 1 and _one_gpu() else 0.0

    def sized(self, deployment: Any, stage: str) -> Any:
        """The deployment with the resources and the autoscaling of a stage."""
        return self._kept(_sized(deployment, self.stages[stage], self.gpus(stage)))

    def routed(self, deployment: Any, stage: str) -> Any:
        """:meth:`sized`, for a deployment whose replica the gateway may choose."""
        router = RequestRouterConfig(request_router_class=HintedRequestRouter)
        policy = AutoscalingPolicy(policy_function=follow_plan)
        sized = _sized(deployment, self.stages[stage], self.gpus(stage), policy=policy)
        return self._kept(sized.options(request_router_config=router))

    def _kept(self, deployment: Any) -> Any:
        version = self.versions.get(deployment.name)
        return deployment if version is None else of_version(deployment, version)

    def spec(self, stage: str, **options: Any) -> WorkerSpec:
        """What a stage's worker is told, ``options`` over what the record and the settings say."""
        record, settings, size = self.record, self.settings, self.stages[stage]
        fields: dict[str, Any] = {
            "model": record.id,
            "stage": stage,
            "task": record.task,
            "weights": record.weights.model_dump(),
            "source": str(self.source),
            "home": str(settings.home),
            "dtype": record.dtype,
            "device": "cuda" if size.num_gpus else "cpu",
            "cpu_threads": size.cpu_threads,
            "kv_cache_bytes": size.kv_cache_bytes or 0,
            "gpu_share": size.gpu_memory_utilization * min(1.0, size.num_gpus or 1.0),
            "max_batch_tokens": size.max_batch_tokens,
            "itl_s": self.profile.targets.itl_s,
            "max_num_seqs": size.max_num_seqs,
            "cuda_graphs": size.cuda_graphs,
            "tensor_parallel": size.tensor_parallel,
            "pipeline_parallel": size.pipeline_parallel,
            "expert_parallel": size.expert_parallel,
            "expert_dispatch": size.expert_dispatch,
            "expert_copies": size.expert_copies,
            "max_model_len": record.properties.context_window or 0,
            "several_nodes": settings.profile != "local",
            "kv_disk_dir": str(settings.kv_disk_dir or ""),
            "kv_disk_bytes": settings.kv_disk_bytes,
            "kv_guaranteed": settings.kv_guaranteed,
            "memory_budget": settings.memory_budget or 0,
            "may_sleep": bool(settings.memory_budget) and not size.min_replicas,
            "gpu_turn": self._turn(size),
            **options,
        }
        return WorkerSpec(**fields)


def _one_gpu() -> bool:
    """Whether no node has more than one, and one has it."""
    return _largest_node() == 1.0


def _largest_node() -> float:
    """GPUs of the node that has most; 0 where no cluster is known yet."""
    if not ray.is_initialized():
        return 0.0
    return max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)


def _sized(deployment: Any, stage: Stage, gpus: float, **autoscale: Any) -> Any:
    """A deployment with the resources and the autoscaling that the catalogue gives its stage, and so many GPUs."""
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
        wanted, strategy = bundles(stage, gpus, _largest_node())
        options["placement_group_bundles"], options["placement_group_strategy"] = wanted, strategy
    return deployment.options(**options)
