"""The shared KV cache: keys, chunks, the pool of a node, and the directory that says which node holds what."""
