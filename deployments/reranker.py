"""Reranker: pairs of a query and a context to scores."""

from __future__ import annotations

from ray import serve
from ray.serve import Application

from deployments.blueprint import Blueprint
from deployments.single_stage import EncoderStage


@serve.deployment(name="Reranker")
class Reranker(EncoderStage):
    """Pairs of a query and a context to scores."""


def application(model: Blueprint) -> Application:
    """The only deployment of such a model."""
    return model.sized(Reranker, "reranker").bind(model.spec("reranker"), model.gpus("reranker"))
