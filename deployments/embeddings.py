"""Embeddings: token sequences to vectors."""

from __future__ import annotations

from ray import serve
from ray.serve import Application

from deployments.blueprint import Blueprint
from deployments.single_stage import EncoderStage


@serve.deployment(name="Embeddings")
class Embeddings(EncoderStage):
    """Token sequences to vectors."""


def application(model: Blueprint) -> Application:
    """The only deployment of such a model."""
    return model.sized(Embeddings, "embeddings").bind(model.spec("embeddings"), model.gpus("embeddings"))
