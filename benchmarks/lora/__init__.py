"""Requests with adapters beside requests without, and beside vLLM."""
