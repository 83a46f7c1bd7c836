"""``serve-app train-draft``: answers, lessons, training, measuring, and a folder that can be served."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serve_app.distill import loop
from serve_app.distill.answers import Batches, Sample, Teacher, write_answers
from serve_app.distill.card import write_card
from serve_app.distill.measure import Acceptance, measure
from serve_app.distill.memory import require_memory
from serve_app.distill.prompts import BadPrompts, Prompts, built_in, prepare, read_prompts
from serve_app.distill.runs import STATE, TrainingRefused, open_state
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.models.loading.folder import UnsupportedModel, read_config


@dataclass(slots=True, frozen=True)
class Options:
    """``serve-app train-draft``'s options; 0 means: chosen from the target. See ``train-draft --help``."""

    model: str
    method: str
    out: str
    prompts: str = ""
    steps: int = 600
    tokens: int = 4
    answer_tokens: int = 128
    temperature: float = 0.0
    batch_tokens: int = 2048
    lr: float = 0.0
    hidden: int = 0
    inner: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    draft_vocab: int = 0
    tie_output: bool = False
    capture: tuple[int, ...] = ()
    seed: int = 0
    threads: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    save_every: int = 50
    stop_at: int = 0
    compare: str = ""


def train(options: Options, folder: Path, say: Callable[[str], None] = print) -> Acceptance | None:
    """Runs or resumes one training for the model in ``folder``; returns what was measured, None if it stopped early.

    Raises :class:`TrainingRefused`, :class:`BadPrompts` or :class:`UnsupportedModel`.
    """
    out = Path(options.out)
    _check(options, folder, out)
    state = open_state(options, out, free=("compare",))
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    items = read_prompts(Path(options.prompts)) if options.prompts else built_in()
    model = load_causal_lm(folder, dtype=options.dtype, device=options.device)
    model = replace(model, max_model_len=min(model.max_model_len, 4096))
    prompts = _prompts(options, items, folder, model)
    say(f"{len(prompts.train)} prompts to learn from, {len(prompts.held_out)} held out")
    samples = write_answers(
        model, prompts.train, state / "answers.jsonl",
        tokens=options.answer_tokens, temperature=options.temperature, seed=options.seed, say=say,
    )  # fmt: skip
    student = make_student(options, folder, model, samples)
    size = _trained(student)
    require_memory(size, options.batch_tokens, model, options.tokens)
    step = _learn(options, student, samples, model, state, say)
    student.save(out, folder if options.method == "model" else options.model)
    if step < options.steps:
        say(f"stopped at step {step}; the same command goes on from there")
        return None
    found = measure(folder, out, options, prompts.held_out)
    other = measure(folder, Path(options.compare), options, prompts.held_out) if options.compare else None
    say(f"{found.length:.2f} tokens a step of the target at {options.tokens} drafts, {found.rate:.1%} of them accepted")
    if other is not None:
        say(f"{options.compare}: {other.length:.2f} tokens a step, {other.rate:.1%} accepted")
    write_card(out, options, size, samples, found, other, _described(student))
    return found


def make_student(options: Options, folder: Path, model: CausalModel, samples: list[Sample]) -> Any:
    """The module to train, fresh."""
    from serve_app.distill import build

    torch.manual_seed(options.seed)
    maker = build.new_head if options.method == "eagle3" else build.new_model
    return maker(options, folder, model, samples).to(model.device)


@torch.enable_grad()
def _learn(
    options: Options, student: nn.Module, samples: list[Sample], model: CausalModel, state: Path, say: Callable
) -> int:
    """Trains from wherever the state is; returns the step that was reached."""
    rate = options.lr or 2e-3
    opts = loop.optimisers(student, rate)
    file = state / "state.safetensors"
    step = loop.load_state(file, student, opts)
    if step:
        say(f"goes on from step {step}")
    batches = Batches(samples, options.batch_tokens, options.seed)
    layers = student.shape.layers if options.method == "eagle3" else ()  # type: ignore[union-attr]
    longest = max(len(s.ids) for s in samples)
    teacher = Teacher(model, tuple(layers), options.batch_tokens, longest)  # type: ignore[arg-type]
    say(f"{_trained(student):,} parameters, {batches.per_epoch} steps an epoch")
    device = model.device.type
    mixed = device == "cuda" or torch.cpu._is_avx512_bf16_supported()
    last = min(options.steps, options.stop_at or options.steps)
    started, shown = time.monotonic(), _Shown()
    try:
        while step < last:
            loop.set_lr(opts, rate * loop.schedule(step, options.steps, warmup=20, decay=0.4))
            lesson = teacher.teach(batches.step(step))
            with torch.autocast(device, torch.bfloat16, enabled=mixed):
                loss, agreed = student(lesson, options.tokens)
            loss.backward()
            loop.update(student, opts)
            step += 1
            shown.add(loss.item(), agreed)
            if step % 20 == 0 or step == last:
                pace = (time.monotonic() - started) / shown.steps
                say(f"step {step}/{options.steps} {shown.line()} {pace * (last - step) / 60:.1f} min left")
            if step % options.save_every == 0:
                loop.save_state(file, step, student, opts)
    finally:
        loop.save_state(file, step, student, opts)
    return step


class _Shown:
    """Averages since the last line."""

    def __init__(self) -> None:
        self.steps = 0
        self._loss: list[float] = []
        self._agreed: list[list[tuple[int, int]]] = []

    def add(self, loss: float, agreed: list[tuple[int, int]]) -> None:
        self.steps += 1
        self._loss.append(loss)
        self._agreed.append(agreed)

    def line(self) -> str:
        depth = max(map(len, self._agreed))
        shares = []
        for i in range(depth):
            counts = [a[i] for a in self._agreed if len(a) > i]
            shares.append(sum(c for c, _ in counts) / max(1, sum(n for _, n in counts)))
        text = f"loss {sum(self._loss) / len(self._loss):.3f} agree {' '.join(f'{s:.2f}' for s in shares)}"
        self._loss, self._agreed = [], []
        return text


def _prompts(options: Options, items: list[dict[str, Any]], folder: Path, model: CausalModel) -> Prompts:
    longest = min(model.max_model_len - 2, options.batch_tokens - options.answer_tokens)
    if longest < 1:
        raise TrainingRefused("batch-tokens leaves no room for a prompt beside an answer; raise it")
    return prepare(items, folder, longest=longest, vocab=model.vocab_size, seed=options.seed)


def _check(options: Options, folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise TrainingRefused(f"there is no model {folder}; give a directory in Hugging Face format or a catalogue id")
    read_config(folder)
    if out.resolve() == folder.resolve():
        raise TrainingRefused("--out is the model's own directory; give another one")
    if options.compare and not (Path(options.compare) / "config.json").is_file():
        raise TrainingRefused(f"--compare {options.compare}: there is no draft; give its directory")
    if (out / "config.json").exists() and not (out / STATE).exists():
        raise TrainingRefused(f"{out} holds a model already; give an empty directory")
    if options.steps < 1 or not 1 <= options.tokens <= 16 or options.answer_tokens < 4:
        raise TrainingRefused("steps must be at least 1, tokens 1 to 16, and answer-tokens at least 4")


def _trained(student: nn.Module) -> int:
    return sum(p.numel() for p in student.parameters() if p.requires_grad)


def _described(student: Any) -> dict[str, Any]:
    return student.describe() if hasattr(student, "describe") else {}


__all__ = ["BadPrompts", "Options", "TrainingRefused", "UnsupportedModel", "train"]
