"""Environment variables that Ray and Serve read when they are imported: set them before, on every node, or
not at all.

One table for the command line, cluster.yaml and the tests (a test keeps cluster.yaml equal). Standard library
only.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# What every process that imports Ray needs, clients included.
COMMON: dict[str, str] = {
    # Token authentication on Ray's own ports: whoever reaches them otherwise runs code as us.
    "RAY_AUTH_MODE": "token",
    # Not RAY_ENABLE_ZERO_COPY_TORCH_TENSORS: it makes every process of Ray import torch, and chunks travel as numpy
    # arrays, which are read without a copy anyway.
    # A reference pickled behind Ray's back is pinned for ever; fail loudly instead of leaking KV chunks.
    "RAY_allow_out_of_band_object_ref_serialization": "0",
    # Ray's head remembers every call of every actor, up to 100,000 of them, for `ray list tasks`: its memory grew by
    # 30 MB a minute at 70 requests a second. Here a call is a request, whose path `GET /v1/requests/{id}` tells.
    "RAY_task_events_report_interval_ms": "0",
    # Nothing leaves the cluster unasked.
    "RAY_USAGE_STATS_ENABLED": "0",
}

# What nodes and the process that deploys need on top.
SERVING: dict[str, str] = {
    # HAProxy in front of the gateways instead of Serve's Python proxy: about ten times the requests per
    # second.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Handles over gRPC and one event loop per replica. Blocks synchronous handle calls from a plain driver
    # thread, which is why clients do not get it.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # gRPC handles refuse messages above 4 MB by default; a long prompt with its keys may pass that.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "67108864",
    # Every scaling step reloads HAProxy, and the old process is killed this long after: as long as a
    # generation may take.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1800",
    # Whether HAProxy lives is asked this often, in a turn of the controller, and three times before another is started:
    # 33 s by default, so 2.3. A stand-in listens meanwhile (stand_in.py).
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.2",
    # Headers of up to 31 KiB reach the gateway, which refuses more than 16 KiB in the envelope; HAProxy can't.
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "32768",
    # Idle connections leave the old HAProxy process over this time instead of lingering until the hard stop.
    "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "30",
    # A gateway replica that leaves waits this long for HAProxy to stop choosing it; one reload takes well
    # under a second.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # Serve gives HAProxy this long to come up before it starts another; its 5 s are too few on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # The controller and the metrics of each replica look around ten times a second by default: a third of what an idle
    # local stack uses. Half a second makes starts longer.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # Ray starts workers at nice 15, where whatever else runs on the machine takes the cores from models. They stay
    # behind Ray's own daemons, which must answer each other in time.
    "RAY_worker_niceness": "5",
    # Autoscaling sees load that is at most this old; the default of 10 s is longer than many generations.
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}

# On one machine, instead: it goes down as a whole, and there is nobody to drain to.
ONE_MACHINE: dict[str, str] = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
    # How long Ray's GCS may take to come up; the default of 30 s is too short where everything starts at once.
    "RAY_gcs_server_port_wait_time_s": "120",
    # A tenth of what an idle stack computes: each of its processes times every call of Ray's own loops, a hundred a
    # second, and an agent looks at all of them every five seconds.
    "RAY_event_stats": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    # A title would be written over the environment, by which Ray's agents are known as this server's
    # (run_directory.py). Ray sets it for its workers alone.
    "SPT_NOENV": "1",
}

# The inner ports that Serve takes from the environment, by the setting that an operator gives.
PORTS: dict[str, str] = {
    "haproxy_metrics_port": "RAY_SERVE_HAPROXY_METRICS_PORT",
    "haproxy_stats_port": "RAY_SERVE_HAPROXY_STATS_PORT",
    "fallback_port": "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
}


def serving_env() -> dict[str, str]:
    """For nodes (raylets) and for the process that deploys the applications."""
    return {**COMMON, **SERVING}


def client_env() -> dict[str, str]:
    """For a driver that only calls a running cluster."""
    return dict(COMMON)


def apply(values: dict[str, str], environ: MutableMapping[str, str]) -> None:
    """Set what is not set yet: an operator's own value wins."""
    for name, value in values.items():
        environ.setdefault(name, value)
