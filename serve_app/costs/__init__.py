"""What computing and moving K/V cost, as measured: one implementation for workers, which decide by it what to fetch,
and for gateways, which decide where requests go."""
