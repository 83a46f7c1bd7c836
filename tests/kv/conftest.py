"""A pool of its own for each test, and a worker's client of it."""

from __future__ import annotations

import pytest
import ray

from serve_app.kv.client import KVClient
from serve_app.kv.nodes import pool_name
from serve_app.kv.pool import get_or_create_pool
from tests.kv.producing import ALONE, BIG, alive
from tests.waiting import wait_for


@pytest.fixture
def node_id():
    return ray.get_runtime_context().get_node_id()


@pytest.fixture
def pool(node_id):
    handle = get_or_create_pool(node_id, ALONE)
    yield handle
    ray.kill(ray.get_actor(pool_name(node_id), "serve_app"))
    wait_for(lambda: not alive(node_id))


@pytest.fixture
def client(node_id, pool):
    client = KVClient(node_id, BIG, ALONE)
    yield client
    client.close()
