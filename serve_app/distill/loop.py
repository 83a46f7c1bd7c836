"""What all training shares: schedule, optimisers, the loss of a student, saving and resuming, progress lines."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def schedule(step: int, steps: int, warmup: int = 60, decay: float = 0.3) -> float:
    """Warm-up, constant, then linear to zero over the last `decay` of the run (WSD): factor on the learning
    rate.
    """
    start = steps * (1 - decay)
    return min((step + 1) / warmup, 1.0, max(steps - step, 0) / max(steps - start, 1))


def optimisers(model: nn.Module, lr: float, muon: bool = True) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (and a head's fc), AdamW for embeddings, norms, biases and outputs."""
    inner: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        (inner if muon and p.ndim == 2 and (".layers." in f".{name}" or name == "fc.weight") else rest).append(p)
    out: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if inner:
        out.append(torch.optim.Muon(inner, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"))
    return out


def set_lr(opts: list[torch.optim.Optimizer], lr: float) -> None:
    for o in opts:
        for g in o.param_groups:
            g["lr"] = lr


def update(model: nn.Module, opts: list[torch.optim.Optimizer]) -> None:
    """A step along the gradients, whose norm is bounded by 1; then there are none."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for o in opts:
        o.step()
        o.zero_grad(set_to_none=True)


def student_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """What a student's ``logits`` [N, V] lose against its teacher's, summed, and where their first choices agree [N].

    Kullback-Leibler divergence, and cross entropy on the teacher's first choice: greedy acceptance is what pays.
    """
    got, best = F.log_softmax(logits.float(), -1), wanted.argmax(-1)
    divergence = F.kl_div(got, F.log_softmax(wanted.float(), -1), reduction="sum", log_target=True)
    return 0.7 * divergence + 0.3 * F.nll_loss(got, best, reduction="sum"), got.argmax(-1) == best


def save_state(path: Path, step: int, model: nn.Module, opts: list[torch.optim.Optimizer]) -> None:
    """Keeps everything a resumed run needs in ``path``; the file there is complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / ".gitignore").write_text("*\n")
    tensors = {f"model {name}": value for name, value in model.state_dict().items()}
    for number, opt in enumerate(opts):
        for index, values in opt.state_dict()["state"].items():
            tensors |= {f"opt{number} {index} {name}": torch.as_tensor(value) for name, value in values.items()}
    part = path.with_suffix(".part")
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, part, {"step": str(step)})
    os.replace(part, path)


def load_state(path: Path, model: nn.Module, opts: list[torch.optim.Optimizer]) -> int:
    """Restores and returns the next step; 0 when there is nothing to resume."""
    if not path.exists():
        return 0
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in opts]
    weights = {}
    with safe_open(path, "pt") as stored:
        for key in stored.keys():  # noqa: SIM118 - safe_open is no mapping
            kind, _, name = key.partition(" ")
            if kind == "model":
                weights[name] = stored.get_tensor(key)
                continue
            index, _, field = name.partition(" ")
            states[int(kind.removeprefix("opt"))].setdefault(int(index), {})[field] = stored.get_tensor(key)
        step = int(stored.metadata()["step"])
    model.load_state_dict(weights)
    for opt, state in zip(opts, states, strict=True):
        opt.load_state_dict({**opt.state_dict(), "state": state})
    return step


class Progress:
    """One line every `every` steps: step, loss, tokens per second, time left in minutes."""

    def __init__(self, name: str, steps: int, every: int = 20) -> None:
        self.name, self.steps, self.every = name, steps, every
        self.last, self.tokens, self.count, self.sums = time.monotonic(), 0, 0, {}  # type: ignore[var-annotated]

    def add(self, step: int, tokens: int, **values: float) -> None:
        self.tokens += tokens
        self.count += 1
        for k, v in values.items():
            self.sums[k] = self.sums.get(k, 0.0) + v
        if (step + 1) % self.every and step + 1 != self.steps:
            return
        now = time.monotonic()
        pace = (now - self.last) / self.count
        shown = " ".join(f"{k} {v / self.count:.4f}" for k, v in self.sums.items())
        print(
            f"{time.strftime('%H:%M:%S')} {self.name} {step + 1}/{self.steps} {shown} "
            f"{self.tokens / (now - self.last):.0f} tok/s {pace * (self.steps - step - 1) / 60:.1f} min left",
            flush=True,
        )
        self.last, self.tokens, self.count, self.sums = now, 0, 0, {}
