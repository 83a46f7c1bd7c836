"""The model card of a trained draft: what it is for, how it was made, how well it drafts."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.distill.answers import Sample
from serve_app.distill.measure import Acceptance

if TYPE_CHECKING:
    from serve_app.distill.train import Options

_CARD = """\
---
library_name: serve-app
---
# {name}

{what} for `{target}`: {size:,} parameters. It is of no use alone; what its target answers does not depend on it.

## Use

In the target's catalogue record:

```yaml
draft: {{{method}weights: {{path: {out}}}, tokens: {tokens}}}
```

## Training

Distilled by `{command}` from the target's own greedy answers to {prompts} prompts ({answers:,} tokens). The answers are
the target's; its licence decides what may be done with them and with this.
{details}
## Score

Greedy answers to {held} held-out prompts ({measured:,} tokens), one at a time, {tokens} drafts a step:

- **{length:.2f} tokens** come out of each step of the target, its own token counted (1.00 without drafts);
- {rate:.1%} of the drafts are accepted.
{other}"""


def write_card(
    out: Path,
    options: Options,
    size: int,
    samples: list[Sample],
    found: Acceptance,
    other: Acceptance | None,
    details: dict[str, Any],
) -> None:
    """Writes README.md and figures.json into ``out``."""
    kinds = {"eagle3": "EAGLE-3 head (arXiv 2503.01840)", "model": "Draft model"}
    text = _CARD.format(
        name=out.resolve().name, what=kinds[options.method], target=options.model, size=size, out=options.out,
        method="method: eagle3, " if options.method == "eagle3" else "", tokens=options.tokens,
        command=command(options), prompts=len(samples), answers=sum(len(s.ids) - s.prompt for s in samples),
        details=_details(details), held=found.prompts, measured=found.tokens, length=found.length, rate=found.rate,
        other=_compared(options.compare, other),
    )  # fmt: skip
    (out / "README.md").write_text(text)
    (out / "figures.json").write_text(json.dumps({**asdict(found), "parameters": size}, indent=2) + "\n")


def command(options: Options) -> str:
    """The command line that makes the same."""
    parts = ["serve-app", "train-draft", options.model]
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name not in ("model", "threads", "save_every", "stop_at", "compare") and value != item.default:
            if value is True:
                parts.append(f"--{item.name.replace('_', '-')}")
                continue
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts += [f"--{item.name.replace('_', '-')}", shown]
    return shlex.join(parts)


def _compared(name: str, other: Acceptance | None) -> str:
    if other is None:
        return ""
    return f"\nOn the same prompts `{name}` has {other.length:.2f} tokens a step and {other.rate:.1%}.\n"


def _details(details: dict[str, Any]) -> str:
    if not details:
        return ""
    layers = ", ".join(map(str, details["layers"]))
    return (
        f"\nIt reads what enters layers {layers}, has {details['q_heads']} query and {details['kv_heads']} key/value "
        f"heads of\n{details['head_dim']}, an MLP of {details['inner']}, and drafts {details['draft_vocab']:,} of "
        f"{details['vocab']:,} tokens.\n"
    )
