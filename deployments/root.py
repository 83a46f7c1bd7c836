"""The root of a text model's application: holds its stages together and is called by nobody.

With HAProxy, Serve gives an application's first deployment an HTTP port per replica and no request router of its own.
Decode needs the second and should not have the first. So it comes second, behind a root that has no replica.
"""

from __future__ import annotations

from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle


@serve.deployment(
    name="Text",
    autoscaling_config=AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1),
    ray_actor_options={"num_cpus": 0},
)
class Text:
    def __init__(self, decode: DeploymentHandle) -> None:
        self._decode = decode
