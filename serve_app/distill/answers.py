"""A model's own answers, written by the engine, and what the model makes of them: the material of training."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from serve_app.engine.blocks import blocks_for
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.step import Capture, Scheduled, build_batch
from serve_app.models.load import CausalModel
from serve_app.sampling_params import SamplingParams

Say = Callable[[str], None]


@dataclass(slots=True)
class Sample:
    """Token ids of a prompt (the first ``prompt`` of them) and of the answer to it."""

    ids: list[int]
    prompt: int


def limits(model: CausalModel, prompts: list[list[int]], answer: int, at_once: int = 16) -> EngineLimits:
    """An engine just large enough for these prompts."""
    longest = min(model.max_model_len, max(map(len, prompts)) + answer + 1)
    size = (at_once * blocks_for(longest) + 1) * model.kv_shape.block_bytes
    return EngineLimits(size, 1024, at_once, longest)


def write_answers(
    model: CausalModel, prompts: list[list[int]], file: Path, *, tokens: int, temperature: float, seed: int, say: Say
) -> list[Sample]:
    """The model's answers to ``prompts``, in their order. ``file`` (JSON lines) keeps them: what it has stays."""
    done = {int(item["index"]): Sample(item["ids"], item["prompt"]) for item in _lines(file)}
    missing = [i for i in range(len(prompts)) if i not in done]
    if missing:
        engine = build_engine(model, limits(model, prompts, tokens))
        started, written = time.monotonic(), 0
        with file.open("a") as out:
            for index, ids in answer(engine, {i: prompts[i] for i in missing}, tokens, temperature, seed):
                done[index] = Sample(prompts[index] + ids, len(prompts[index]))
                out.write(json.dumps({"index": index, "prompt": len(prompts[index]), "ids": done[index].ids}) + "\n")
                before, written = written, written + len(ids)
                if before // 4000 != written // 4000 or len(done) == len(prompts):
                    out.flush()
                    pace = written / (time.monotonic() - started)
                    say(f"answers {len(done)}/{len(prompts)}, {written} tokens, {pace:.0f} tokens/s")
    return [done[i] for i in range(len(prompts))]


def answer(engine: Engine, prompts: dict[int, list[int]], tokens: int, temperature: float, seed: int):
    """Yields (index, answer's token ids) as answers are complete."""
    texts: dict[str, list[int]] = {}
    for index, prompt in prompts.items():
        room = min(tokens, engine.scheduler.max_model_len - len(prompt) - 1)
        sampling = SamplingParams(max_tokens=max(1, room), temperature=temperature, seed=seed + index)
        engine.add(Request(str(index), list(prompt), len(prompt), sampling, b"train-draft"))
        texts[str(index)] = []
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                yield int(output.request_id), texts.pop(output.request_id)


def _lines(file: Path) -> list[dict]:
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # an interrupted write
            break
    file.write_text("".join(json.dumps(item) + "\n" for item in found))
    return found


class Batches:
    """Samples in steps of about ``tokens`` tokens. Which ones step i has depends on the seed and i alone."""

    def __init__(self, samples: list[Sample], tokens: int, seed: int) -> None:
        self._samples, self._tokens, self._seed = samples, tokens, seed
        self._epoch = -1
        self._steps: list[list[int]] = []

    @property
    def per_epoch(self) -> int:
        return len(self._cut(0))

    def step(self, step: int) -> list[Sample]:
        epoch = 0
        while step >= len(self._cut(epoch)):
            step -= len(self._cut(epoch))
            epoch += 1
        return [self._samples[i] for i in self._cut(epoch)[step]]

    def _cut(self, epoch: int) -> list[list[int]]:
        if epoch == self._epoch:
            return self._steps
        rng = random.Random(f"{self._seed}:{epoch}")
        order = list(range(len(self._samples)))
        rng.shuffle(order)
        steps: list[list[int]] = []
        for start in range(0, len(order), 256):
            # Of like length, so that little is padded.
            group = sorted(order[start : start + 256], key=lambda i: len(self._samples[i].ids))
            steps.append([])
            for index in group:
                longest = len(self._samples[index].ids)
                if steps[-1] and (len(steps[-1]) + 1) * longest > self._tokens:
                    steps.append([])
                steps[-1].append(index)
        rng.shuffle(steps)
        self._epoch, self._steps = epoch, steps
        return steps


@dataclass(slots=True)
class Lesson:
    """One batch of B samples padded to L tokens, and what the teacher says of it.

    ``logits`` [N, V] belong to the rows where ``answers`` [B, L] is true, row by row: those whose next token is the
    model's own. ``states`` [B, L, layers, hidden] is what enters the captured layers; None if none are.
    """

    ids: Tensor  # [B, L] int64
    answers: Tensor  # [B, L] bool
    logits: Tensor
    states: Tensor | None


class Teacher:
    """The served model's own forward pass over whole samples, without padding."""

    def __init__(self, model: CausalModel, layers: tuple[int, ...], tokens: int, longest: int) -> None:
        self._model, self._layers = model, layers
        blocks = 2 * blocks_for(tokens) + blocks_for(longest) + 64
        self._kv = model.kv_shape.allocate(blocks, model.device)

    @torch.no_grad()
    def teach(self, samples: list[Sample]) -> Lesson:
        scheduled, at = [], 1
        for index, sample in enumerate(samples):
            count = blocks_for(len(sample.ids))
            request = Request(str(index), sample.ids, 1, SamplingParams(), b"", blocks=list(range(at, at + count)))
            request.state = 1 + index
            at += count
            # The row of the last token is left out: what follows it was never written.
            scheduled.append(Scheduled(request, 0, len(sample.ids) - 1, len(sample.ids) - sample.prompt))
        if at > self._kv.num_blocks or (self._kv.states and len(samples) >= len(self._kv.states[0])):
            blocks = max(at, self._kv.num_blocks)
            self._kv = self._model.kv_shape.allocate(blocks, self._model.device, len(samples))
        batch = build_batch(scheduled, self._kv)
        batch.capture = Capture(self._layers) if self._layers else None
        logits = self._model.forward(batch)
        lengths = [len(s.ids) - 1 for s in samples]
        longest, device = max(lengths), self._model.device
        ids = torch.zeros(len(samples), longest + 1, dtype=torch.int64)
        answers = torch.zeros(len(samples), longest + 1, dtype=torch.bool)
        states = None
        if batch.capture is not None and batch.capture.states is not None:
            parts = batch.capture.states.split(lengths)
            states = parts[0].new_zeros(len(samples), longest + 1, *parts[0].shape[1:])
            for row, part in enumerate(parts):
                states[row, : len(part)] = part
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
            answers[row, sample.prompt - 1 : len(sample.ids) - 1] = True
        return Lesson(ids.to(device), answers.to(device), logits, states)
