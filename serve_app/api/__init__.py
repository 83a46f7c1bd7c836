"""The dialects: what clients send and read, as pure functions between bytes and the nouns of `types`. No Ray,
no torch."""
