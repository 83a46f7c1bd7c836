"""Distil pico-draft from pico-instruct on the same batches: `python -m training.distill [--resume]`.

The loss is the KL divergence from the teacher's next-token distribution to the draft's, on the assistant's
tokens (and code), plus a share of cross entropy on the teacher's own greedy choice: greedy acceptance is
what pays.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.distill import loop
from training import STATE, pretrain, tokenizer
from training.data import Batches
from training.export import copy_tokenizer, export
from training.threads import Threads

OUT = Path("checkpoints/pico-draft")


def build(vocab: int) -> LlamaForCausalLM:
    """1.28 million parameters: 2 layers of width 128, 4 query heads on 2 key/value heads of 32."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=1e-5,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=440)
    p.add_argument("--lr", type=float, default=6e-3)
    p.add_argument("--decay", type=float, default=0.4)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--export-every", type=int, default=200)
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    torch.set_flush_denormal(True)
    teacher = LlamaForCausalLM.from_pretrained(pretrain.OUT, dtype=torch.float32).eval()
    tok = tokenizer.load(pretrain.OUT)
    copy_tokenizer(pretrain.OUT, OUT)
    batches = Batches(tok, a.seed)
    model = build(tok.get_vocab_size()).train()
    opts = loop.optimisers(model, a.lr)
    step = loop.load_state(STATE / "pico-draft.safetensors", model, opts) if a.resume else 0
    print(f"{sum(x.numel() for x in model.parameters()):,} parameters, from step {step}", flush=True)
    progress = loop.Progress("pico-draft", a.steps)
    while step < a.steps:
        threads.adapt()
        loop.set_lr(opts, a.lr * loop.schedule(step, a.steps, decay=a.decay))
        micros = batches.step(step)
        total = sum(int(m.loss[:, 1:].sum()) for m in micros)
        seen = loss_sum = agree = 0.0
        for m in micros:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                wanted = teacher.lm_head(pretrain.hidden(teacher, m)).float()
            h = pretrain.hidden(model, m)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model.lm_head(h)
            loss, agreed = loop.student_loss(logits, wanted)
            (loss / total).backward()
            loss_sum += loss.item() / total
            agree += agreed.sum().item() / total
            seen += m.ids.numel()
        loop.update(model, opts)
        progress.add(step, int(seen), loss=loss_sum, agree=agree)
        step += 1
        if step % a.save_every == 0 or step == a.steps:
            loop.save_state(STATE / "pico-draft.safetensors", step, model, opts)
        if step % a.export_every == 0 or step == a.steps:
            export(model, OUT, step, pretrain.generation_config())


if __name__ == "__main__":
    main()
