"""Imported once by the process that all others are forked from."""

import transformers  # noqa: F401

import benchmarks.families.work  # noqa: F401
import serve_app.engine.build  # noqa: F401
import serve_app.models.loading.optimise  # noqa: F401
