"""Train pico-reranker, a BERT cross-encoder: `python -m training.rerank [--resume]`.

Each question is scored against its docstring and seven distractors; the loss is the cross entropy of
picking the right one (listwise softmax), plus a small pointwise term so that sigmoid(score) is meaningful
on its own.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification

from serve_app.distill import loop
from training import STATE
from training.export import export
from training.passages import Examples, Passage, build_passages
from training.phrases import ASK
from training.threads import Threads

OUT = Path("checkpoints/pico-reranker")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB, MAX_TOKENS, OTHERS, QUESTIONS = 6144, 128, 7, 16


def train_tokenizer(passages: list[Passage]) -> Tokenizer:
    """Lower-case WordPiece in BERT's layout: [CLS] a [SEP] b [SEP] with token types 0 and 1."""
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(True)])
    tok.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), show_progress=False)
    tok.train_from_iterator([p.named for p in passages] + list(ASK) * 20, trainer)
    cls, sep = tok.token_to_id("[CLS]"), tok.token_to_id("[SEP]")
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )  # fmt: skip
    return tok


def save_tokenizer(tok: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }  # fmt: skip
    for name, text in (
        ("tokenizer.json", tok.to_str()),
        ("tokenizer_config.json", json.dumps(config, indent=2) + "\n"),
        ("special_tokens_map.json", json.dumps(names, indent=2) + "\n"),
    ):
        part = directory / f".{name}.part"
        part.write_text(text)
        os.replace(part, directory / name)


def build(vocab: int) -> BertForSequenceClassification:
    """About 3 million parameters: 4 layers of width 192, 6 heads of 32, one score."""
    config = BertConfig(
        vocab_size=vocab, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768,
        max_position_embeddings=512, num_labels=1, pad_token_id=0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    # Comparing words is the whole task and slow to emerge from noise, so the first layer starts out doing it: words
    # stand out against positions, and queries equal keys, so that a token attends to its copies in the other segment,
    # whose token type then shows in the attended value.
    with torch.no_grad():
        bert = model.bert
        kinds = bert.embeddings.token_type_embeddings.weight
        bert.embeddings.word_embeddings.weight.normal_(0, 0.06)
        bert.embeddings.position_embeddings.weight.normal_(0, 0.01)
        kinds.normal_(0, 0.06)
        basis = torch.linalg.qr(kinds.T)[0]  # the directions of the token types do not take part in the comparison
        words = torch.eye(config.hidden_size) - basis @ basis.T
        first = bert.encoder.layer[0].attention.self
        first.query.weight.copy_(1.75 * words)
        first.key.weight.copy_(1.75 * words)
        first.value.weight.copy_(torch.eye(config.hidden_size))
    return model


def encode(tok: Tokenizer, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Padded int64 tensors [N, L] of question-passage pairs, cut at `MAX_TOKENS`."""
    tok.enable_truncation(MAX_TOKENS)
    tok.enable_padding(pad_id=0, pad_token="[PAD]")
    enc = tok.encode_batch(pairs)
    out = {
        "input_ids": torch.tensor([e.ids for e in enc]),
        "token_type_ids": torch.tensor([e.type_ids for e in enc]),
        "attention_mask": torch.tensor([e.attention_mask for e in enc]),
    }
    tok.no_padding()
    tok.no_truncation()
    return out


def score(
    model: BertForSequenceClassification, tok: Tokenizer, pairs: list[tuple[str, str]], parts: int = 4
) -> torch.Tensor:
    """Scores float32 [N] of the pairs; pairs of like length share a batch, which saves a third of the padding."""
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
    size = -(-len(pairs) // parts)
    out = []
    for start in range(0, len(pairs), size):
        with torch.autocast("cpu", torch.bfloat16):
            out.append(model(**encode(tok, [pairs[i] for i in order[start : start + size]])).logits[:, 0].float())
    inverse = torch.empty(len(order), dtype=torch.int64)
    inverse[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(out)[inverse]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--lr", type=float, default=7e-4)
    p.add_argument("--decay", type=float, default=0.3)
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--export-every", type=int, default=100)
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    torch.set_flush_denormal(True)
    passages = build_passages()
    if a.resume and (OUT / "tokenizer.json").exists():
        tok = Tokenizer.from_file(str(OUT / "tokenizer.json"))
    else:
        tok = train_tokenizer(passages)
        save_tokenizer(tok, OUT)
    examples = Examples(passages)
    model = build(tok.get_vocab_size()).train()
    opts = loop.optimisers(model, a.lr, muon=False)
    step = loop.load_state(STATE / "pico-reranker.safetensors", model, opts) if a.resume else 0
    size = sum(x.numel() for x in model.parameters())
    print(
        f"{size:,} parameters, {len(examples.pool)} passages in training, "
        f"{len(passages) - len(examples.pool)} held out, from step {step}",
        flush=True,
    )
    progress = loop.Progress("pico-reranker", a.steps)
    if step == 0:
        export(model, OUT, step)
    while step < a.steps:
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps, decay=a.decay))
        rng = Random(f"{a.seed}:{step}")
        pairs = []
        for _ in range(QUESTIONS):
            question, texts = examples.draw(OTHERS, rng)
            pairs += [(question, t) for t in texts]
        scores = score(model, tok, pairs).view(QUESTIONS, OTHERS + 1)
        right = torch.zeros_like(scores)
        right[:, 0] = 1.0
        pointwise = F.binary_cross_entropy_with_logits(scores, right, pos_weight=torch.tensor(float(OTHERS)))
        loss = F.cross_entropy(scores, torch.zeros(QUESTIONS, dtype=torch.long)) + 0.3 * pointwise
        loss.backward()
        loop.update(model, opts)
        top1 = (scores.argmax(1) == 0).float().mean().item()
        progress.add(step, len(pairs), loss=loss.item(), top1=top1)
        step += 1
        if step % a.save_every == 0 or step == a.steps:
            loop.save_state(STATE / "pico-reranker.safetensors", step, model, opts)
        if step % a.export_every == 0 or step == a.steps:
            export(model, OUT, step)


if __name__ == "__main__":
    main()
