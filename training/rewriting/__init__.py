"""Models that write one text for another: what they are taught, and what learns it."""
