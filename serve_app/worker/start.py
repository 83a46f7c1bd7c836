"""Puts an engine worker together: engine, pool, channel. Imports torch, so workers only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from serve_app.kv.chunk import Layout
from serve_app.kv.client import KVClient
from serve_app.kv.costs import FetchCosts
from serve_app.kv.export import ExportBuffer
from serve_app.kv.keys import BLOCK_TOKENS
from serve_app.kv.machine import priors
from serve_app.kv.pool import PoolOptions, get_or_create_pool
from serve_app.worker.draft_link import DraftLink
from serve_app.worker.engine_work import EngineWork
from serve_app.worker.kv_publish import Publisher
from serve_app.worker.loading import Progress, load_engine
from serve_app.worker.ranks import StartRank, begin_ranks
from serve_app.worker.spec import WorkerSpec


def start_engine_work(
    spec: WorkerSpec,
    progress: Progress,
    *,
    node_id: str,
    worker_id: str,
    exporter: Callable[[], Any],
    start_rank: StartRank,
    host: str,
    zone: str = "",
) -> EngineWork:
    """Loads the model; chunks go to the pool of ``node_id``, which asks ``exporter()`` for their bytes. Of a worker of
    several ranks this is rank 0, which the others reach at ``host``. ``zone``: of the node.
    """

    def publish(layout: Layout, of_states: Layout | None) -> Publisher:
        options = _pool_options(spec, zone)
        # Started with the worker, or the first request would wait for it.
        get_or_create_pool(node_id, options)
        client = KVClient(node_id, layout, options, costs=FetchCosts(priors()))
        states = None
        if of_states is not None:
            states = KVClient(node_id, of_states, options, min_remote_tokens=BLOCK_TOKENS, costs=FetchCosts(priors()))
        # A prefill has two states on their way, and the engine waits where there is no room.
        room = spec.export_bytes + (8 * of_states.block_bytes if of_states is not None else 0)
        return Publisher(client, ExportBuffer(room), exporter, states)

    draft = DraftLink()
    loaded = load_engine(
        spec,
        progress,
        publish=publish,
        draft=draft,
        begin=lambda: begin_ranks(spec, start_rank, host, progress, node=node_id),
    )
    work = EngineWork(spec, loaded, draft, node_id=node_id, worker_id=worker_id, zone=zone)
    progress("ready")
    return work


def _pool_options(spec: WorkerSpec, zone: str) -> PoolOptions:
    return PoolOptions(
        zone=zone,
        use_directory=spec.several_nodes,
        disk_directory=spec.kv_disk_dir or os.path.join(spec.home, "kv"),
        disk_bytes=spec.kv_disk_bytes,
        guaranteed=spec.kv_guaranteed,
    )
