"""Chunks made as an engine worker makes them, for a pool on a real Ray node."""

from __future__ import annotations

import time
import uuid

import ray

from serve_app.kv.export import ExportBuffer
from serve_app.kv.nodes import pool_name
from serve_app.kv.pool import PoolOptions
from tests.kv.chunks import LAYOUT, cut, payload, prompt_keys, root

MB = 1024 * 1024
# 512 KiB a block, 4 MiB a chunk of 256 tokens: like a small real model.
BIG = type(LAYOUT).of([(4, 128)] * 8, "bfloat16", 2)

ALONE = PoolOptions(limit_bytes=100 * MB, use_directory=False)


@ray.remote(num_cpus=0, max_concurrency=4)
class Worker:
    """Makes chunks the way an engine worker does; ``breakage`` spoils them on purpose."""

    def __init__(self, breakage: str = "") -> None:
        self.export_buffer = ExportBuffer(64 * MB)
        self.breakage = breakage

    def make(self, metas):
        for meta in metas:
            self.export_buffer.put(meta.chunk_id, payload(meta))

    def export_chunk(self, chunk_id):
        data = self.export_buffer.take(chunk_id)
        if self.breakage == "short":
            return data[:-1]
        if self.breakage == "type":
            return "not an array"
        if self.breakage == "dies":
            import os

            os._exit(1)
        if self.breakage == "slow":
            time.sleep(1.0)
        return data

    def waiting(self):
        return len(self.export_buffer)


def alive(node_id):
    try:
        ray.get_actor(pool_name(node_id), "serve_app")
    except ValueError:
        return False
    return True


def prompt(count: int) -> list[int]:
    """Tokens nobody else has."""
    start = uuid.uuid4().int % 10**6
    return [start + i for i in range(count)]


async def produce(client, tokens, base=None, worker=None):
    base = base or root()
    metas = cut(tokens, base, BIG)
    worker = worker or Worker.remote()
    await worker.make.remote(metas)
    held = await client.publish(metas, worker)
    return worker, metas, held


async def fetch(client, tokens, **options):
    return await client.fetch(*prompt_keys(tokens, root()), **options)


def end(found):
    return found[-1][0].end_token if found else 0


async def lost(client, tokens) -> bool:
    return not await fetch(client, tokens)
