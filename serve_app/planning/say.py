"""A plan in lines for people."""

from __future__ import annotations

from serve_app.planning.plan import Plan
from serve_app.planning.ranks import unpacked_roles
from serve_app.planning.rates import MULTIPLIES, READS


def said(plan: Plan) -> str:
    """The whole plan; every byte has a name."""
    model, asked, split = plan.model, plan.asked, plan.split
    device = asked.device
    each = f"{asked.count} x {device.name}, {_size(device.memory)} each"
    lines = [
        f"{model.name} on {each}, of which {asked.utilization:.1%} may be used",
        f"{model.values / 1e9:.2f} billion weights, {model.active_values / 1e9:.2f} billion for a token",
        *([f"asked for: {model.wanted}"] if str(model.wanted) else []),
        f"best split: {split}",
        "",
        f"weights          {_size(model.weight_bytes):>12}",
    ]
    lines += [f"  {role:20} {_size(size):>12}" for role, size in model.by_role().items()]
    if unpacked := unpacked_roles(model, split):
        lines.append(f"  in 16 bits once they are loaded: {', '.join(unpacked)}")
    if model.dropped:
        lines.append(f"  {'not served':20} {_size(model.dropped):>12}  layers behind the last, which draft")
    width = max([20, *(len(name) for rank in plan.ranks for name in rank.media)])
    for stage, (rank, left) in enumerate(zip(plan.ranks, plan.left, strict=True)):
        ranks = f"{split.tensor} ranks" if split.tensor > 1 else "1 rank"
        lines += ["", f"stage {stage}, layers {rank.first} to {rank.last - 1}, {ranks}, each holds at most"]
        lines += [f"  {role:{width}} {_size(size):>12}" for role, size in rank.weights.items()]
        more = (
            ("activations", rank.activations),
            *rank.media.items(),
            ("reserve", device.reserve),
            ("K/V cache", left),
        )
        lines += [f"  {name:{width}} {_size(size):>12}" for name, size in more]
        if rank.passing:
            lines.append(f"  {'until it is loaded':{width}} {_size(rank.passing):>12}  in the place of the cache")
    if plan.unused_bytes:
        lines += ["", f"unused           {_size(plan.unused_bytes):>12}  on ranks that neither see nor hear"]
    bounded = [cache for cache in model.caches if cache.bound]
    lines += [
        "",
        f"K/V cache        {_size(plan.left_bytes):>12}  on all ranks of a replica",
        f"  a token        {plan.token_bytes:>12,} bytes, of {len(model.caches)} layers",
    ]
    if bounded:
        lines.append(f"  beyond windows {plan.far_token_bytes:>12,} bytes; {len(bounded)} layers look back no further")
    lines += [
        f"  tokens         {plan.tokens:>12,}  every layer keeping every token, as the engine does",
        f"  of one text    {plan.tokens_of_one_text:>12,}  layers keeping what queries look back to",
        f"  streams        {plan.streams(asked.context):>12,}  of {asked.context:,} tokens",
        "",
        f"tokens per second of a replica, by a roofline at {READS:.0%} of bandwidth and {MULTIPLIES:.0%} of products",
        f"  one stream     {plan.rates.single:>12,.1f}",
        f"  {plan.rates.streams} streams     {plan.rates.decode:>12,.1f}",
        f"  prompts        {plan.rates.prefill:>12,.0f}",
    ]
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:,.2f} MiB"
