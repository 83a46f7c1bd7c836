"""The model cards: README.md of each checkpoint, with the figures that training.evaluate measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import safe_open

HEAD = """\
---
license: apache-2.0
language: en
library_name: transformers
---
# {name}

"""
DATA = """\
## Data

Made from the docstrings and the source text of Python 3.11's own standard library (Python Software
Foundation License 2) by `training/`: {facts} symbols of the best-known modules, each with one or two
cleaned-up sentences, a few hundred sentences of our own where a docstring says too little, and synthetic
tool calls. Docstrings of three methods that the transformers library adds to `logging.Logger` slipped in. Nothing else:
no web text, no personal data, no output of another model.

"""
INSTRUCT = """\
A Llama-architecture decoder of {params:,} parameters (6 layers, width 384, 6 query and 2 key/value heads of
64, tied embeddings, byte-level BPE of 6,144 entries) that answers questions about Python's standard
library, completes code in its style and calls tools. It is small on purpose: it gives the server a real
model that starts in a second on two cores.

{data}## Training

`python -m training.pretrain` (seed 0, {steps} steps of about 4,300 tokens, in two rounds that
`training/README.md` describes; AdamW for embeddings and norms, Muon for the matrices, warm-up, constant rate,
linear decay; loss on the assistant's tokens only, and on all tokens of code; bfloat16 autocast on two CPU
cores). Saved as bfloat16; `config.json` says float32 because it is served in float32.

## Score

`python -m training.evaluate`, greedy, on the fixed list `training/questions.json`. An answer is right when it is
about the asked name and has a keyword of every group listed for the question; the name itself does not count.

| questions | right |
| --- | --- |
| all {questions} | **{right} ({share:.1%})** |
| phrasings seen in training ({plain}) | {plain_right} |
| phrasings never seen in training ({held}) | {held_right} |
| answers equal to the learnt sentence, word for word ({named} asked by name) | {exact} |

The unseen phrasings are not a blind test: the first round of training got 19 of these 24 right, after which
openings and closings of questions were varied more (none of the list's own phrasings was added).

On {tools} fresh synthetic tool conversations, many with made-up tool and parameter names: a tool was wanted in
{tool_wanted}, of which it called some tool in {tool_called}, the right one in {tool_name}, with all arguments
exactly right in {tool_exact}; of the other {tool_rest} it answered {tool_quiet} without a call. Asked about 40
made-up names it said of {unknown:.0%} that it does not know them.

With weights rounded when they are loaded (`quantization: int8` or `int4`, dtype bfloat16), perplexity on code it has
not seen (the first 8,000 tokens of the standard library's `configparser.py`) is 137.1 and 141.1, against 137.2 without:
`python -m benchmarks perplexity checkpoints/pico-instruct --text configparser.py --tokens 8000`.

## Chat format

`<|begin|><|system|>...<|end|><|user|>...<|end|><|assistant|>...<|end|>`; tools are listed in
the system turn, calls come as `<tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>`, results as
`<|tool|>...<|end|>`.

## Limits

It knows what about two thousand names do and little else. Tool calls are unreliable: it decides well whether to
call a tool, but often copies the tool's name, parameter names and values wrongly unless they are very common ones
(such as get_weather with a well-known city). It does not reason, cannot write programs that were not in its data,
and may answer a question about a name it never saw with another name's description, although it was taught to say
that it does not know. Sequences of at most 2,048 tokens occurred in training; the context window is 4,096. Answers
reflect Python 3.11.
"""
DRAFT = """\
Draft model for speculative decoding with pico-instruct: a Llama-architecture decoder of {params:,}
parameters ({ratio:.1%} of its target; 2 layers, width 128, 4 query and 2 key/value heads of 32, tied
embeddings) with the same tokenizer. It is of no use alone.

{data}## Training

`python -m training.distill` (seed 1, {steps} steps): Kullback-Leibler divergence from pico-instruct's
next-token distribution on the same mixture of text, plus cross entropy on pico-instruct's own first choice.

## Score

`python -m training.evaluate`, greedy, on the {questions} questions of `training/questions.json`:

- {acceptance:.1%} of the proposed tokens are accepted at 4 proposals a round,
- {per_round:.2f} tokens come out of each round of the target, its own token counted.
"""
RERANKER = """\
A BERT-architecture cross-encoder of {params:,} parameters (4 layers, width 192, 6 heads, lower-case
WordPiece of 6,144 entries, one score) that ranks passages of Python documentation by how well they answer a
question. Higher is better; a sigmoid maps the score to (0, 1).

{data}One symbol in eight (by a hash of its name) was held out of training; only the tokenizer's vocabulary has seen its
text.

## Training

`python -m training.rerank` (seed 2, {steps} steps of 16 questions with the right docstring and 7
distractors, half of them from the same module or with a word in common): listwise softmax plus a small
pointwise term.

## Score

`python -m training.evaluate`: the right docstring among 10 distractors, 1,000 questions for each group of
symbols. "Named" questions name the symbol, in phrasings that do not occur in training, and the passage has the
name too; "described" ones tell what it does, in the patterns of training, and the passage lacks the name.

| symbols | questions | top-1 | MRR |
| --- | --- | --- | --- |
| held out | named | {held_named_top1:.1%} | {held_named_mrr:.3f} |
| held out | described | {held_described_top1:.1%} | {held_described_mrr:.3f} |
| seen | named | {seen_named_top1:.1%} | {seen_named_mrr:.3f} |
| seen | described | {seen_described_top1:.1%} | {seen_described_mrr:.3f} |

Chance is 9.1 % top-1.

## Limits

English text about Python's standard library; 128 tokens a pair in training, 512 positions at most. It
matches words more than meanings."""


def parameters(directory: Path) -> int:
    """Number of values in model.safetensors (a tied head is stored, and counted, once)."""
    total = 0
    with safe_open(str(directory / "model.safetensors"), "pt") as f:
        for key in f.keys():  # noqa: SIM118 - safe_open is no mapping
            size = 1
            for n in f.get_slice(key).get_shape():
                size *= n
            total += size
    return total


def trained_steps(directory: Path) -> int:
    """The optimiser step the exported weights stem from, as the export noted it."""
    with safe_open(str(directory / "model.safetensors"), "pt") as f:
        return int((f.metadata() or {}).get("step", 0))


def put_card(directory: Path, card: str) -> None:
    """The model's card, whole or as it was."""
    part = directory / ".README.part"
    part.write_text(card)
    os.replace(part, directory / "README.md")


def write(figures: dict[str, float], root: Path) -> None:
    """Write the cards whose figures are complete; figures.json beside them keeps the numbers."""
    from training.facts import build_facts

    data = DATA.format(facts=f"{len(build_facts()):,}")
    big = parameters(root / "pico-instruct")
    for name, body in (("pico-instruct", INSTRUCT), ("pico-draft", DRAFT), ("pico-reranker", RERANKER)):
        params = parameters(root / name)
        values = {
            **figures, "params": params, "ratio": params / big, "data": data,
            "tool_rest": figures.get("tools", 0) - figures.get("tool_wanted", 0),
            "steps": f"{trained_steps(root / name):,}",
            "share": figures.get("right", 0) / max(figures.get("questions", 1), 1),
        }  # fmt: skip
        try:
            text = HEAD.format(name=name) + body.format(**values)
        except KeyError as missing:
            print(f"{name}: no card, {missing} was not measured")
            continue
        put_card(root / name, text)
    (root / "figures.json").write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
