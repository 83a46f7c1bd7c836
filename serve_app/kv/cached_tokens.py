"""Where the tokens of a prompt come from, as results, metrics and traces name it; stored ones are `cached_tokens`."""

# Found stored: in the worker's own blocks, in its node's pool, in that pool's files, in another node's pool.
FOUND = ("own", "node", "disk", "remote")
# And computed: for this request by a prefill worker, or where it is generated.
SOURCES = (*FOUND, "prefilled", "computed")
