"""Score the shipped models: `python -m training.evaluate [--write]`; `--write` puts the figures into the
model cards.

pico-instruct: greedy answers to the fixed list in questions.json, judged by keyword groups. pico-draft:
share of its greedy proposals that the target accepts on the same questions. pico-reranker: rank of the
right docstring among ten distractors, for symbols that were held out of its training and for phrasings that
were.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from training import cards, toolcalls
from training.facts import build_facts
from training.passages import Examples, build_passages
from training.phrases import HELD_OUT

CHECKPOINTS = Path("checkpoints")
QUESTIONS = Path(__file__).with_name("questions.json")


def is_right(item: dict, answer: str) -> bool:
    """Whether an answer opens with the right name, if with any, and then meets every group of keywords.

    The opening name does not count towards the keywords: it only repeats the question.
    """
    about = item.get("about")
    match = re.match(r"`([^`]+)`", answer)
    if about and match:
        if match.group(1) != about:
            return False
        answer = answer[match.end() :]
    text = answer.lower()
    return all(any(word in text for word in group) for group in item["expect"])


class Chat:
    """Greedy generation with transformers, one question at a time."""

    def __init__(self, name: str = "pico-instruct") -> None:
        self.tok = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
        self.model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name).eval()

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> torch.Tensor:
        """Prompt ids int64 [1, L]."""
        text = self.tok.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        return self.tok(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    def tokens(self, prompt: torch.Tensor, limit: int = 96) -> list[int]:
        with torch.no_grad():
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False
            )
        return out[0, prompt.shape[1] :].tolist()

    def answer(self, question: str) -> str:
        ids = self.tokens(self.prompt([{"role": "user", "content": question}]))
        return self.tok.decode(ids, skip_special_tokens=True).strip()


@dataclass(slots=True)
class Acceptance:
    """Draft tokens proposed and accepted at `k` a round; `rate` in [0, 1]; `per_round` counts the target's
    own token.
    """

    proposed: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / max(self.proposed, 1)

    @property
    def per_round(self) -> float:
        return self.tokens / max(self.rounds, 1)


def accept(draft: torch.nn.Module, prompt: torch.Tensor, wanted: list[int], k: int, into: Acceptance) -> None:
    """Simulate speculative greedy decoding: the draft proposes `k` tokens, the target keeps the matching
    prefix.
    """
    done = 0
    while done < len(wanted):
        ids = torch.cat([prompt, torch.tensor([wanted[:done]], dtype=torch.int64)], 1)
        n = min(k, len(wanted) - done)
        good = 0
        for i in range(n):
            with torch.no_grad():
                best = int(draft(ids).logits[0, -1].argmax())
            into.proposed += 1
            if best != wanted[done + i]:
                into.proposed += n - i - 1
                break
            good += 1
            ids = torch.cat([ids, torch.tensor([[best]])], 1)
        into.accepted += good
        into.rounds += 1
        into.tokens += min(good + 1, len(wanted) - done)  # a sequence that ends within a round has no token after it
        done += good + 1


def tool_scores(chat: Chat, count: int = 80) -> dict[str, float]:
    """Counts over fresh synthetic tool conversations (a seed that training never used).

    Of the `tool_wanted` ones in which a tool fits: `tool_called` (any), `tool_name` (the right one), `tool_exact` (name
    and all arguments exactly right). Of the others: `tool_quiet`, answered without a call.
    """
    rng = Random("evaluate tools")
    facts = build_facts()
    called = quiet = named = exact = wanted = 0
    for _ in range(count):
        plain = rng.choice(HELD_OUT).format(n=rng.choice(facts).name)
        messages, tools = toolcalls.sample(rng, (plain, ""))
        turn = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        ids = chat.tokens(chat.prompt(messages[:turn], tools))
        text = chat.tok.decode(ids, skip_special_tokens=True)
        calls = messages[turn].get("tool_calls")
        if not calls:
            quiet += not text.startswith("<tool_call>")
        else:
            wanted += 1
            called += text.startswith("<tool_call>")
            function = calls[0]["function"]
            named += text.startswith(f'<tool_call>{{"name": "{function["name"]}"')
            exact += text == f"<tool_call>{json.dumps(function)}</tool_call>"
    return {
        "tools": count, "tool_wanted": wanted, "tool_called": called, "tool_quiet": quiet, "tool_name": named,
        "tool_exact": exact,
    }  # fmt: skip


def unknown_score(chat: Chat, count: int = 40) -> float:
    """Share of made-up names about which the model says that it does not know them."""
    rng = Random("evaluate unknown")
    names = [f"{toolcalls.word(rng)}.{toolcalls.word(rng)}" for _ in range(count)]
    return sum("don't know" in chat.answer(f"What does {n} do?") for n in names) / count


def rerank_scores(passages_held_out: bool, count: int = 1000, distractors: int = 10) -> dict[str, float]:
    """Top-1 and mean reciprocal rank of the right docstring among `distractors` others, by kind of
    question.
    """
    from training import rerank

    tok = rerank.Tokenizer.from_file(str(CHECKPOINTS / "pico-reranker" / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(CHECKPOINTS / "pico-reranker").eval()
    examples, rng = Examples(build_passages(), held_out=passages_held_out), Random("evaluate")
    sums = {"named": [0.0, 0.0, 0.0], "described": [0.0, 0.0, 0.0]}
    for _ in range(count):
        right = rng.choice(examples.pool)
        others = examples.distractors(right, distractors, rng)
        question, by_name = examples.question(right, rng, held_out_phrases=True)
        texts = [p.named if by_name else p.bare for p in (right, *others)]
        with torch.no_grad():
            scores = model(**rerank.encode(tok, [(question, t) for t in texts])).logits[:, 0]
        rank = int((scores >= scores[0]).sum())
        row = sums["named" if by_name else "described"]
        row[0] += 1
        row[1] += rank == 1
        row[2] += 1 / rank
    return {f"{kind}_{label}": row[i] / row[0] for kind, row in sums.items() for i, label in ((1, "top1"), (2, "mrr"))}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--write", action="store_true", help="write the model cards")
    p.add_argument("--only", choices=("instruct", "draft", "reranker"))
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--limit", type=int, help="only so many questions and tool conversations")
    p.add_argument("--json", action="store_true", help="one JSON object as the last line")
    p.add_argument("-v", "--verbose", action="store_true", help="print every answer")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    items = json.loads(QUESTIONS.read_text())["questions"][: a.limit]
    figures: dict[str, float] = {}
    if a.only in (None, "instruct", "draft"):
        chat = Chat()
        draft = Chat("pico-draft").model if a.only != "instruct" else None
        right, exact, acceptance, groups = 0, 0, Acceptance(), {False: [0, 0], True: [0, 0]}
        learnt = {f.name: f.answer for f in build_facts()}
        for item in items:
            prompt = chat.prompt([{"role": "user", "content": item["question"]}])
            ids = chat.tokens(prompt)
            answer = chat.tok.decode(ids, skip_special_tokens=True).strip()
            good = is_right(item, answer)
            right += good
            exact += answer == learnt.get(item.get("about"))
            groups[item["held_out"]][0] += good
            groups[item["held_out"]][1] += 1
            if a.verbose or not good:
                print(f"{'right' if good else 'WRONG'}: {item['question']} -> {answer}")
            if draft is not None:
                accept(draft, prompt, ids, 4, acceptance)
        figures |= {
            "questions": len(items), "right": right, "exact": exact,
            "named": sum("about" in i for i in items), "plain_right": groups[False][0],
            "plain": groups[False][1],
            "held_right": groups[True][0], "held": groups[True][1],
        }  # fmt: skip
        print(f"pico-instruct: {right}/{len(items)} right = {right / len(items):.1%}; "
              f"held-out phrasings {groups[True][0]}/{groups[True][1]}; "
              f"{exact} word for word")  # fmt: skip
        if a.only != "draft":
            figures |= tool_scores(chat, a.limit or 80) | {"unknown": unknown_score(chat, a.limit or 40)}
            shown = {k: v for k, v in figures.items() if k.startswith(("tool_", "unknown"))}
            print(f"pico-instruct: {shown}")
        if draft is not None:
            figures |= {"acceptance": acceptance.rate, "per_round": acceptance.per_round}
            print(
                f"pico-draft: {acceptance.rate:.1%} of proposed tokens accepted at k=4, "
                f"{acceptance.per_round:.2f} tokens a round"
            )
    if a.only in (None, "reranker"):
        for label, held in (("held", True), ("seen", False)):
            scores = rerank_scores(held)
            figures |= {f"{label}_{k}": v for k, v in scores.items()}
            print(
                f"pico-reranker, symbols {'held out' if held else 'seen'}: "
                + ", ".join(f"{k} {v:.3f}" for k, v in scores.items())
            )
    if a.json:
        print(json.dumps(figures))
    if a.write:
        known = CHECKPOINTS / "figures.json"
        before = json.loads(known.read_text()) if a.only and known.exists() else {}
        cards.write(before | figures, CHECKPOINTS)


if __name__ == "__main__":
    main()
