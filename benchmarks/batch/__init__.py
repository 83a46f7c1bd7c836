"""Batches: their order, what they cost others, and what their intake takes."""
