"""The catalogue: which models there are, what they cost, where their weights lie and how they are served."""

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.load import Catalog, load_catalog
from serve_app.catalog.records import ModelRecord, Stage, Weights

__all__ = ["Catalog", "CatalogError", "ModelRecord", "Stage", "Weights", "load_catalog"]
