"""``serve-app bench trace TRACE``: replays a request trace against a simulated cluster, or against a live server.

The simulation runs the product's own routing, admission, fairness and planner code and the pool's own LRU; only the
engines are modelled (``benchmarks/trace/engine.py`` says how). With ``--live URL`` the same trace goes to a server.
Every request must end once with all of its tokens, or be refused.
"""


def main(argv: list[str] | None = None) -> int:
    from benchmarks.trace.command import run

    return run(argv)
