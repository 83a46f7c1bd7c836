"""One causal language model: our engine beside transformers' ``generate`` and a teacher-forced pass."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.request import Request
from serve_app.kv.keys import root_key
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.sampling_params import SamplingParams

NEW_TOKENS = 8
TIE = 1e-3  # how far apart, in units of the logits' spread, two tokens are equally good
LENGTHS = (1, 5, 31, 32, 33, 58, 70, 130, 200)

STATE_SLOTS = 160


def compare(model_class: Any, folder: Path, seed: int) -> tuple[str, str, str]:
    """(served by, verdict, note) of a checkpoint; verdict is ``exact``, ``wrong`` or ``refused``."""
    from serve_app.models.loading.folder import UnsupportedModel

    try:
        model = load_causal_lm(folder, dtype="float32")
    except UnsupportedModel as refusal:
        return "refused", "refused", str(refusal).replace(f"{folder}/", "").replace(str(folder), "the folder")
    served = "fast layer" if "fused_decoder" in model.report else "transformers' forward"
    reference = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    note = _differs(model, reference, seed)
    return served, "wrong" if note else "exact", note


def lengths_of(seed: int) -> tuple[int, ...]:
    """Lengths of texts, ascending: of seed 0 :data:`LENGTHS`, of others a short one, some around the borders of blocks
    and chunks, and some anywhere."""
    if seed == 0:
        return LENGTHS
    rng = random.Random(f"lengths {seed}")
    borders = [rng.choice([32, 48, 64, 96, 128, 160, 192, 224]) + rng.choice([-1, 0, 1]) for _ in range(4)]
    return tuple(sorted({rng.randint(1, 4), *borders, *(rng.randint(5, 240) for _ in range(4)), rng.randint(200, 240)}))


def prompts(seed: int, vocab: int, context: int) -> list[list[int]]:
    """One prompt of each length that fits; the last two share a beginning."""
    rng = random.Random(seed)
    lengths = [n for n in lengths_of(seed) if n + NEW_TOKENS < context]
    made = [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
    return [*made, made[-1][: lengths[-1] // 2] + [rng.randrange(3, vocab) for _ in range(9)]]


@torch.inference_mode()
def expected_tokens(reference: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    reference.generation_config.eos_token_id = None
    for bound in ("min_length", "max_length", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens"):
        setattr(reference.generation_config, bound, None if bound != "min_length" else 0)
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        num_beams=1,
    )
    return out[0, len(prompt) :].tolist()


def _differs(model: CausalModel, reference: Any, seed: int) -> str:
    """The first way of running the prompts whose tokens are not those of ``generate``, or nothing."""
    given = prompts(seed, model.vocab_size, model.max_model_len)
    wanted = [expected_tokens(reference, p) for p in given]
    ways: list[tuple[str, dict[str, Any], int]] = [
        ("one after the other", {"max_num_seqs": 1}, 0),
        ("together, in chunks of 48", {"max_batch_tokens": 48}, 0),
        *(("together, with preemption", {}, blocks) for blocks in (12, 13, 11, 14, 10)),
    ]
    preempted = False
    for name, options, blocks in ways:
        if preempted:
            break
        limits = EngineLimits(
            kv_cache_bytes=(blocks or 120) * model.kv_shape.block_bytes,
            max_model_len=model.max_model_len,
            state_slots=STATE_SLOTS if model.kv_shape.states.parts else 0,
            **options,
        )
        engine = build_engine(model, limits)
        for again in ("", ", again from the prefix cache")[: 1 if blocks else 2]:
            got = _generate(engine, given)
            for index, (tokens, right) in enumerate(zip(got, wanted, strict=True)):
                if tokens != right and (at := _first_difference(reference, given[index], tokens, right)) is not None:
                    return f"{name}{again}: token {at} behind a prompt of {len(given[index])} differs from generate"
        preempted = bool(blocks and engine.scheduler.preemptions)
        if not blocks and engine.stats.cached_tokens == 0 and max(map(len, given)) > 64:
            return "the second run found nothing in the prefix cache"
    # Layers that keep states alone have no use for blocks.
    return "" if preempted or not model.kv_shape.layers else "nothing was preempted although blocks were few"


def _generate(engine: Any, given: list[list[int]]) -> list[list[int]]:
    root = root_key(b"families", "", b"tenant")
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(given):
        engine.add(Request(str(index), list(prompt), len(prompt), params, root))
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
    return [outputs[str(i)] for i in range(len(given))]


@torch.inference_mode()
def _first_difference(reference: Any, prompt: list[int], got: list[int], right: list[int]) -> int | None:
    """Where ``got`` leaves what the model says, by a teacher-forced pass; None where two tokens were equally good."""
    at = next(i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
    ids = torch.tensor([prompt + right[:at]])
    places = torch.arange(ids.shape[1])[None]
    logits = reference(input_ids=ids, position_ids=places, use_cache=False).logits[0, -1].float()
    return at if float(logits[right[at]] - logits[got[at]]) > TIE * float(logits.std()) else None
