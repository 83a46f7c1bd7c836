"""Batches: what checks and orders their requests, and what runs them."""
