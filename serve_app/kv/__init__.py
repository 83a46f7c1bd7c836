"""The shared KV cache: keys, chunks, the pool of a node, and the directory of who holds what."""
