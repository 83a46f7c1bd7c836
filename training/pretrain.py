"""Train pico-instruct: `python -m training.pretrain` (add `--resume` to go on after an interruption)."""

from __future__ import annotations

import argparse
import faulthandler
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.distill import loop
from training import STATE, tokenizer
from training.data import Batches, Micro
from training.export import export
from training.threads import Threads

OUT = Path("checkpoints/pico-instruct")


def build(vocab: int) -> LlamaForCausalLM:
    """11.8 million parameters: 6 layers of width 384, 6 query heads on 2 key/value heads of 64."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=1e-5,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def generation_config() -> dict:
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 256,
    }


def hidden(model: LlamaForCausalLM, micro: Micro) -> torch.Tensor:
    """Hidden states [N, H] at the positions whose next token counts."""
    with torch.autocast("cpu", torch.bfloat16):
        h = model.model(micro.ids[:, :-1], use_cache=False).last_hidden_state
    return h[micro.loss[:, 1:]]


def second_round(step: int, first: int, last: int, warmup: int = 10) -> float:
    """Factor on the learning rate of a round after the first run: short warm-up, then linear to zero."""
    return min((step - first + 1) / warmup, max(last - step, 0) / max(last - first, 1))


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=1100)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--decay", type=float, default=0.3, help="share of the run in which the rate falls to zero")
    p.add_argument("--round-from", type=int, default=0, help="first step of a second round (with --resume)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--export-every", type=int, default=200)
    p.add_argument("--stop-at", type=int, default=0, help="stop after this step (for measuring)")
    p.add_argument("--resume", action="store_true")
    a = p.parse_args()
    threads = Threads(a.threads)
    torch.manual_seed(a.seed)
    torch.set_flush_denormal(True)
    if not (OUT / "tokenizer.json").exists():
        tokenizer.save(tokenizer.train(), OUT, 4096)
    tok = tokenizer.load(OUT)
    batches = Batches(tok, a.seed)
    model = build(tok.get_vocab_size()).train()
    opts = loop.optimisers(model, a.lr)
    step = loop.load_state(STATE / "pico-instruct.safetensors", model, opts) if a.resume else 0
    size = sum(x.numel() for x in model.parameters())
    print(
        f"{size:,} parameters, {len(batches.deck)} facts in the deck, from step {step}",
        flush=True,
    )
    progress = loop.Progress("pico-instruct", a.steps)
    while step < a.steps:
        threads.adapt()
        factor = loop.schedule(step, a.steps, decay=a.decay)
        if a.round_from:
            factor = second_round(step, a.round_from, a.steps)
        loop.set_lr(opts, a.lr * factor)
        micros = batches.step(step)
        total = sum(int(m.loss[:, 1:].sum()) for m in micros)
        seen = loss_sum = 0.0
        for m in micros:
            h = hidden(model, m)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model.lm_head(h)
            loss = F.cross_entropy(logits.float(), m.ids[:, 1:][m.loss[:, 1:]], reduction="sum") / total
            loss.backward()
            loss_sum += loss.item()
            seen += m.ids.numel()
        loop.update(model, opts)
        progress.add(step, int(seen), loss=loss_sum)
        step += 1
        if step % a.save_every == 0 or step == a.steps:
            loop.save_state(STATE / "pico-instruct.safetensors", step, model, opts)
        if step % a.export_every == 0 or step == a.steps:
            export(model, OUT, step, generation_config())
        if step == a.stop_at:
            break


if __name__ == "__main__":
    main()
