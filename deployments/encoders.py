"""Embeddings and Reranker: text encoders behind the gateway."""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.spec import WorkerSpec


class _Encoder:
    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:
        from deployments.encoder_worker import EncoderWorker

        self._worker = EncoderWorker.options(num_gpus=num_gpus).remote(spec)  # type: ignore[attr-defined]
        await self._worker.info.remote()

    async def encode(self, wire: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`deployments.encoder_worker.EncoderWorker.encode`."""
        return await self._worker.encode.remote(wire)

    async def stats(self) -> dict[str, Any]:
        return await self._worker.stats.remote()

    async def all_stats(self, wire: dict[str, Any]) -> list[dict[str, Any]]:
        return [await self.stats()]

    async def check_health(self) -> None:
        await self._worker.info.remote()


@serve.deployment(name="Embeddings")
class Embeddings(_Encoder):
    """Token sequences to vectors."""


@serve.deployment(name="Reranker")
class Reranker(_Encoder):
    """Pairs of a query and a context to scores."""
