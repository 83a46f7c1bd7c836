"""``serve-app train-lora``: PEFT's LoRA on transformers' model, from lines of text to a folder that can be uploaded."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.adapters.weights import read_adapter
from serve_app.distill import loop
from serve_app.distill.runs import STATE, TrainingRefused, open_state
from serve_app.finetune.card import base_name, write_card
from serve_app.finetune.data import BadData, Batches, Sample, cut, read_data
from serve_app.models.loading.folder import UnsupportedModel, read_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEARS = "all-linear"


@dataclass(slots=True, frozen=True)
class Options:
    """``serve-app train-lora``'s options; 0 means: chosen from the rest. See ``train-lora --help``."""

    model: str
    data: str
    out: str
    rank: int = 8
    alpha: float = 0.0
    modules: tuple[str, ...] = ()
    epochs: float = 3.0
    steps: int = 0
    batch_tokens: int = 2048
    max_tokens: int = 1024
    lr: float = 1e-3
    held_out: float = 0.05
    seed: int = 0
    threads: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    save_every: int = 50
    stop_at: int = 0


@dataclass(slots=True, frozen=True)
class Score:
    """Of lines that were not learnt from: mean loss of a token in nats, and how many tokens were the likeliest."""

    loss: float
    right: float
    tokens: int

    @property
    def shown(self) -> str:
        return f"loss {self.loss:.3f}, {self.right:.1%} of {self.tokens} tokens foreseen"


@dataclass(slots=True, frozen=True)
class Trained:
    """``before``: the base model alone."""

    before: Score
    after: Score
    steps: int
    samples: int
    seconds: float


def train(options: Options, folder: Path, say: Callable[[str], None] = print) -> Trained | None:
    """Runs or resumes one training for the model in ``folder``; None if it stopped early.

    Raises :class:`TrainingRefused`, :class:`BadData` or :class:`UnsupportedModel`.
    """
    out = Path(options.out)
    _check(options, folder, out)
    state = open_state(options, out)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = _with_adapter(options, folder)
    data = read_data(
        Path(options.data), folder, _eos(model),
        longest=min(options.max_tokens, options.batch_tokens), held_out=options.held_out, seed=options.seed,
    )  # fmt: skip
    longer = f", {data.left_out} left out as too long" if data.left_out else ""
    say(f"{len(data.train)} lines to learn from, {len(data.held_out)} held out{longer}")
    learning = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
    batches = Batches(data.train, options.batch_tokens, options.seed)
    steps = options.steps or max(1, math.ceil(options.epochs * batches.per_epoch))
    say(f"{sum(p.numel() for p in learning):,} parameters, {steps} steps, {batches.per_epoch} an epoch")
    before = _kept(state / "before.json", lambda: _score(model, data.held_out, options))
    say(f"before: {before.shown}")
    began = time.monotonic()
    step = _learn(options, model, learning, batches, steps, state, say)
    if step < steps:
        say(f"stopped at step {step}; the same command goes on from there")
        return None
    after = _score(model, data.held_out, options)
    say(f"after: {after.shown}")
    _save(options, model, out)
    found = Trained(before, after, steps, len(data.train), time.monotonic() - began)
    write_card(out, options, found)
    say(f"{out} can be uploaded: {CONFIG} and {WEIGHTS}, {(out / WEIGHTS).stat().st_size / 1e6:.1f} MB")
    return found


def _with_adapter(options: Options, folder: Path) -> Any:
    """The model with a fresh adapter, of which alone the parameters are learnt."""
    from transformers import AutoModelForCausalLM

    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise TrainingRefused("train-lora needs PEFT: pip install 'serve-app[train]'") from None
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype, use_safetensors=True)
    base.to(options.device)
    told = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha or 2 * options.rank,
        target_modules=list(options.modules) or ALL_LINEARS,
    )
    with torch.enable_grad():
        try:
            model = get_peft_model(base, told)
        except ValueError as error:
            raise TrainingRefused(f"--modules: {error}") from None
    return model


def _eos(model: Any) -> frozenset[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.get_text_config().eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


@torch.enable_grad()
def _learn(
    options: Options, model: Any, learning: nn.ParameterList, batches: Batches, steps: int, state: Path, say: Callable
) -> int:
    """Trains from wherever the state is; returns the step that was reached."""
    optimiser = torch.optim.AdamW(learning, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    file = state / "state.safetensors"
    step = loop.load_state(file, learning, [optimiser])
    if step:
        say(f"goes on from step {step}")
    last = min(steps, options.stop_at or steps)
    began, done, losses = time.monotonic(), 0, []
    model.train()
    try:
        while step < last:
            loop.set_lr([optimiser], options.lr * loop.schedule(step, steps, warmup=min(20, steps), decay=0.6))
            total, _, count = _loss(model, batches.step(step), options)
            (total / count).backward()
            nn.utils.clip_grad_norm_(learning, 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            step, done = step + 1, done + 1
            losses.append(total.item() / count)
            if step % 10 == 0 or step == last:
                left = (time.monotonic() - began) / done * (last - step)
                say(f"step {step}/{steps} loss {sum(losses) / len(losses):.3f} {left / 60:.1f} min left")
                losses.clear()
            if step % options.save_every == 0:
                loop.save_state(file, step, learning, [optimiser])
    finally:
        loop.save_state(file, step, learning, [optimiser])
        model.eval()
    return step


@torch.no_grad()
def _score(model: Any, samples: list[Sample], options: Options) -> Score:
    model.eval()
    loss, right, count = 0.0, 0, 0
    for batch in cut(samples, options.batch_tokens):
        more, found, tokens = _loss(model, batch, options)
        loss, right, count = loss + more.item(), right + found, count + tokens
    return Score(loss / count, right / count, count)


def _loss(model: Any, batch: list[Sample], options: Options) -> tuple[Tensor, int, int]:
    """The loss of a batch's learnt tokens, summed; how many of them were the likeliest; how many there are."""
    width = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    learnt = torch.zeros(len(batch), width, dtype=torch.bool)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, sample in enumerate(batch):
        length = len(sample.ids)
        ids[row, :length] = torch.tensor(sample.ids)
        learnt[row, :length] = torch.tensor(sample.learnt)
        mask[row, :length] = 1
    ids, learnt, mask = (each.to(options.device) for each in (ids, learnt, mask))
    mixed = options.device != "cpu" or torch.cpu._is_avx512_bf16_supported()
    with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=mixed):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    wanted = learnt[:, 1:]
    rows, targets = logits[:, :-1][wanted].float(), ids[:, 1:][wanted]
    right = int((rows.argmax(-1) == targets).sum())
    return F.cross_entropy(rows, targets, reduction="sum"), right, len(targets)


def _save(options: Options, model: Any, out: Path) -> None:
    """PEFT's two files, complete or not there, and no path of this machine in them."""
    made = out / STATE / "adapter"
    # By its path PEFT finds the model here; by a name it would look for it elsewhere.
    model.peft_config["default"].base_model_name_or_path = model.get_base_model().name_or_path
    model.save_pretrained(made, safe_serialization=True)
    told = json.loads((made / CONFIG).read_text())
    told |= {"base_model_name_or_path": base_name(options.model), "inference_mode": True}
    # A set, in an order of its own each time.
    if isinstance(told.get("target_modules"), list):
        told["target_modules"].sort()
    (made / CONFIG).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
    read_adapter((made / CONFIG).read_bytes(), made / WEIGHTS)
    for name in (CONFIG, WEIGHTS):
        (made / name).replace(out / name)
    shutil.rmtree(made)


def _kept(file: Path, measure: Callable[[], Score]) -> Score:
    """A score that is measured once, however often a run is resumed."""
    if not file.exists():
        file.write_text(json.dumps(asdict(measure())) + "\n")
    return Score(**json.loads(file.read_text()))


def _check(options: Options, folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise TrainingRefused(f"there is no model {folder}; give a directory in Hugging Face format or a catalogue id")
    read_config(folder)
    if out.resolve() == folder.resolve():
        raise TrainingRefused("--out is the model's own directory; give another one")
    if (out / CONFIG).exists() and not (out / STATE).exists():
        raise TrainingRefused(f"{out} holds an adapter already; give an empty directory")
    if not 1 <= options.rank <= 256:
        raise TrainingRefused(
            f"--rank {options.rank}: from 1 to 256; models take up to 32 unless their record says more"
        )
    if options.steps < 0 or options.epochs <= 0 or not 0 < options.held_out < 0.5 or options.max_tokens < 2:
        raise TrainingRefused("epochs and steps must be positive, held-out between 0 and 0.5, max-tokens at least 2")


__all__ = ["BadData", "Options", "Score", "Trained", "TrainingRefused", "UnsupportedModel", "train"]
