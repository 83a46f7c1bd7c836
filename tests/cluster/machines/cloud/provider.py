"""Ray's provider for the cloud of ``server.py``, as a cloud's own is: it asks, and logs in by ssh. Stands by itself, as
it lies on the cloud's machines: of this project it imports nothing.
"""

from __future__ import annotations

import copy
import json
import os
import urllib.request
from typing import Any

from ray.autoscaler.node_provider import NodeProvider

KEY = "~/.ssh/cloud"
GIB = 1 << 30
# As the cloud would tell of these types.
TYPES = {
    "m6i.2xlarge": {"CPU": 8, "memory": 32 * GIB},
    "p4de.24xlarge": {"CPU": 96, "memory": 1152 * GIB, "GPU": 8, "accelerator_type:A100": 1},
}


class Namespaces(NodeProvider):  # type: ignore[misc]
    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        return [
            name
            for name, node in self._ask("list").items()
            if all(node["tags"].get(tag) == value for tag, value in tag_filters.items())
        ]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._ask("list")

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict(self._ask("list")[node_id]["tags"])

    def external_ip(self, node_id: str) -> str:
        return str(self._ask("list")[node_id]["address"])

    internal_ip = external_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        return {name: {} for name in self._ask("create", config=node_config, tags=tags, count=count)}

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._ask("tag", id=node_id, tags=tags)

    def terminate_node(self, node_id: str) -> None:
        self._ask("terminate", id=node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Names the key by which its machines are reached, as the provider for AWS does."""
        config = copy.deepcopy(cluster_config)
        config["auth"].setdefault("ssh_private_key", os.path.expanduser(KEY))
        return config

    @staticmethod
    def fillout_available_node_types_resources(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """What a type of machine has, unless the file says it, as the provider for AWS does."""
        config = copy.deepcopy(cluster_config)
        for node in config["available_node_types"].values():
            found = TYPES[node["node_config"]["InstanceType"]]
            node["resources"] = {**found, **node.get("resources", {})}
        return config

    def _ask(self, what: str, **told: Any) -> Any:
        request = urllib.request.Request(f"{self.provider_config['url']}/{what}", json.dumps(told).encode())
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
