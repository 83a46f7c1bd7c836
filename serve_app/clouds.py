"""The file for ``ray up`` on each cloud: ``cluster.yaml``, which is for AWS, with other machines and another provider.

``serve-app config PROFILE --cloud gcp`` prints it. Commands, environment and paths are those of ``cluster.yaml``
itself, so that no two files have to be kept alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from serve_app.catalog.load import PROJECT_ROOT

Name = Literal["aws", "gcp", "azure"]
CLOUDS = get_args(Name)


@dataclass(slots=True, frozen=True)
class Cloud:
    """``before``: what its owner does before the first ``ray up``, line by line. ``blocks``: top-level keys with what
    stands there instead, as YAML. ``sdk``: packages with which the head makes machines, beside those that are locked.
    """

    title: str
    before: str
    blocks: dict[str, str]
    sdk: str


_GCP = Cloud(
    "GCP",
    """\
#   2. make a subnet whose firewall lets in: everything between its own machines; port 22 from your address; port 8000
#      from your load balancer. Not port 22 from everywhere, as the network that a project begins with, and nothing else
#      from 0.0.0.0/0: replica ports (30000-31000) and HAProxy's pages (8404, 9101) do not ask for a key.
#   3. choose project, zone, images and machine types, and install what `ray up` needs where you run it:
#      .venv/bin/python -m pip install SDK
""",
    {
        "provider": """\
  type: gcp
  region: us-central1
  availability_zone: us-central1-a
  project_id: REPLACE
  cache_stopped_nodes: false
""",
        "available_node_types": """\
  head:
    # No CPUs to give: replicas never compete with the controller and the cluster's own bookkeeping.
    resources: {"CPU": 0}
    node_config:
      machineType: n2-standard-8
      disks:
        - boot: true
          autoDelete: true
          type: PERSISTENT
          initializeParams: {diskSizeGb: 128, sourceImage: REPLACE}  # Ubuntu with Python 3.11 to 3.13
      networkInterfaces: &network
        - {subnetwork: regions/us-central1/subnetworks/REPLACE, accessConfigs: [{type: ONE_TO_ONE_NAT}]}
  gpu:
    min_workers: 1
    max_workers: 4
    resources: {"CPU": 96, "GPU": 8}  # Ray does not know machine types of GCP; 8 A100 80 GB
    node_config:
      machineType: a2-ultragpu-8g
      scheduling: [{onHostMaintenance: TERMINATE}]
      disks:
        - boot: true
          autoDelete: true
          type: PERSISTENT
          # Ubuntu with Python 3.11 to 3.13 and the NVIDIA driver; room for weights
          initializeParams: {diskSizeGb: 1000, sourceImage: REPLACE}
      networkInterfaces: *network
""",
    },
    "google-api-python-client==2.184.0 google-auth-httplib2==0.2.0",
)
_AZURE = Cloud(
    "Azure",
    """\
#   2. log in (`az login`). Ray makes a network and a security group, with port 22 open to everybody: narrow that rule
#      to your address after the first `ray up`, and let your load balancer in at port 8000. Nothing else from outside:
#      replica ports (30000-31000) and HAProxy's pages (8404, 9101) do not ask for a key.
#   3. choose location, images and sizes, make the key pair named below (`ssh-keygen -f ~/.ssh/serve-app`), and install
#      what `ray up` needs where you run it:
#      .venv/bin/python -m pip install SDK
""",
    {
        "provider": """\
  type: azure
  location: eastus
  resource_group: serve-app
  cache_stopped_nodes: false
""",
        "auth": """\
  ssh_user: ubuntu
  ssh_private_key: ~/.ssh/serve-app
  ssh_public_key: ~/.ssh/serve-app.pub
""",
        "available_node_types": """\
  head:
    # No CPUs to give: replicas never compete with the controller and the cluster's own bookkeeping.
    resources: {"CPU": 0}
    node_config:
      azure_arm_parameters:
        vmSize: Standard_D8s_v5
        imagePublisher: canonical  # Ubuntu with Python 3.11 to 3.13
        imageOffer: ubuntu-24_04-lts
        imageSku: server
        imageVersion: latest
  gpu:
    min_workers: 1
    max_workers: 4
    resources: {"CPU": 96, "GPU": 8}  # Ray does not know sizes of Azure; 8 A100 80 GB
    node_config:
      azure_arm_parameters:
        vmSize: Standard_ND96amsr_A100_v4
        imagePublisher: microsoft-dsvm  # Ubuntu with the NVIDIA driver; it needs Python 3.11 to 3.13 or uv as well
        imageOffer: ubuntu-hpc
        imageSku: "2204"
        imageVersion: latest
""",
    },
    "azure-common==1.1.28 azure-core==1.35.0 azure-identity==1.23.1 azure-mgmt-compute==35.0.0 "
    "azure-mgmt-network==29.0.0 azure-mgmt-resource==24.0.0 msrest==0.7.1 msrestazure==0.6.4.post1",
)
_OTHERS: dict[str, Cloud] = {"gcp": _GCP, "azure": _AZURE}


def render(name: str) -> str:
    """The file for a cloud of :data:`CLOUDS`, as text with its comments."""
    text = (PROJECT_ROOT / "cluster.yaml").read_text()
    if name == "aws":
        return text
    cloud = _OTHERS[name]
    text = text.replace("GPU nodes on AWS", f"GPU nodes on {cloud.title}", 1)
    # What is to be done before: from the second step up to the next paragraph.
    text = _replaced(text, r"(?s)#   2\. .*?(?=# Gateways on)", cloud.before.replace("SDK", cloud.sdk))
    blocks = cloud.blocks | {"head_setup_commands": f"  - ~/serve-app/.venv/bin/python -m pip install {cloud.sdk}\n"}
    for key, block in blocks.items():
        text = _replaced(text, rf"(?m)^{key}:.*\n(?:[ ].*\n)*", f"{key}:\n{block}")
    return text


def _replaced(text: str, pattern: str, by: str) -> str:
    text, count = re.subn(pattern, lambda _: by, text)
    if count != 1:
        raise ValueError(f"cluster.yaml has {count} times what other clouds have otherwise: {pattern}")
    return text
