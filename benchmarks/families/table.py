"""The lines as a table in the documentation."""

from __future__ import annotations

from collections import Counter

from benchmarks.families.architectures import TASKS
from benchmarks.families.work import Line

HEAD = """# Families

Every architecture of transformers {version} that reads text, as this product serves it. `python -m benchmarks families`
makes this page: it builds a random checkpoint of each, loads it as a worker does, and compares it with transformers on
the same weights in float32: greedy tokens with `generate` (alone, in mixed batches, in chunks, after preemption, from
the prefix cache, past windows and original lengths), vectors and scores with one sequence at a time.

*Fast layer* is the fused decoder, *transformers' forward* is transformers' own modelling code on the paged cache, *flat
batches* are computed without padding. What is *refused* does not load, and says why. *Untried* are those of which
transformers itself makes or runs no such checkpoint.

## Large models of Workers AI

All have a record (`serve_app/catalog/models`), and are of families below that are exact, on one rank and on several
([parallel.md](parallel.md)); `tests/planning/large.py` names the configurations that they are checked with. Of DeepSeek
V4 that is the one of the previews, of which the releases differ in what drafts, as those say who have read both.

Of nemotron-3-120b-a12b calls of tools are not read, nor its checkpoints in 8 and 4 bits (ModelOpt). Of Kimi K2.5 to
K2.7, GLM 5.3 Flash and Gemma 4 pictures are not served. GLM 5.3 and GLM 5.3 Flash have windows of 1,310,720 tokens at
Cloudflare, and positions for 1,048,576; eight GPUs of 141 GB hold 327,680 tokens of GLM 5.3 beside its weights.
"""
_TITLES = {
    "text-generation": "Text generation",
    "text-embeddings": "Embeddings",
    "reranking": "Reranking",
}


def counts(lines: list[Line]) -> Counter[str]:
    """How many lines there are of each verdict."""
    return Counter(line.verdict for line in lines)


def summary(lines: list[Line]) -> str:
    """One sentence about lines."""
    found = counts(lines)
    served = Counter(line.served for line in lines if line.verdict == "exact")
    how = ", ".join(f"{n} on {served_by}" for served_by, n in served.most_common())
    rest = ", ".join(f"{found[v]} {v}" for v in ("wrong", "failed", "refused", "untried") if found[v])
    return f"{found['exact']} exact ({how})" + (f", {rest}" if rest else "")


def page(lines: list[Line], version: str) -> str:
    """The whole of docs/families.md."""
    parts = [HEAD.format(version=version)]
    for task in TASKS:
        chosen = [line for line in lines if line.task == task]
        if not chosen:
            continue
        parts.append(
            f"## {_TITLES[task]}\n\n{summary(chosen)}.\n\n| architecture | served by | why not |\n| --- | --- | --- |"
        )
        for line in chosen:
            name = line.architecture + (f", {line.variant}" if line.variant else "")
            served = line.served if line.verdict == "exact" else line.verdict
            parts[-1] += f"\n| {name} | {served} | {_cell(line.note)} |"
        parts[-1] += "\n"
    return "\n".join(parts)


def _cell(note: str) -> str:
    short = note if len(note) <= 220 else note[:217] + "..."
    return short.replace("|", "\\|").replace("<", "&lt;")
