"""What a model's record says to the policy of its dispatch."""

from __future__ import annotations

from dataclasses import replace

from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.costs import CPU_PRIORS
from serve_app.routing.dispatch import DispatchConfig
from serve_app.routing.prices import RouterConfig
from serve_app.tasks.model import ServedModel

# A record that wants even the shortest prompt prefilled elsewhere means more by its roles than a second is worth.
STRICT_ROLE_COST_S = 1.0


def dispatch_config(model: ServedModel) -> DispatchConfig:
    """For :class:`serve_app.routing.dispatch.Dispatch`."""
    profile = model.profile
    # Short prompts have few chunks: small models serve them, and their index can afford to look closer.
    router = RouterConfig(
        chunk_tokens=64 if (model.context_window or 8192) <= 8192 else 256,
        least_handover=max(1, profile.min_remote_prefill_tokens),
    )
    if profile.min_remote_prefill_tokens == 0:
        router = replace(router, role_cost=STRICT_ROLE_COST_S, short_s=0.0)
    on_gpu = any(stage.num_gpus for stage in profile.stages.values())
    return DispatchConfig(
        admission=AdmissionConfig(Targets(ttft=profile.targets.ttft_s, itl=profile.targets.itl_s)),
        slots=model.slots,
        scales_to_zero=model.scales_to_zero,
        prefill_stage="prefill" in profile.stages,
        priors=None if on_gpu else CPU_PRIORS,
        router=router,
    )
