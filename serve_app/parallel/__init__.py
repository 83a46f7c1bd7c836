"""A worker of several processes: rank 0 is the engine, the others compute their part of each of its steps."""
