"""What workers of small tasks share: a model that answers each input by itself, in batches over requests."""
