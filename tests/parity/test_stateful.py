"""Models whose layers keep a state beside keys and values: the same greedy tokens as transformers' ``generate``, from
whatever kept state a text goes on, and whatever its drafts were."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.proposer import Draft
from serve_app.engine.speculation.speculate import Speculation
from tests import tiny
from tests.variants import some

NEW_TOKENS = 24
# Of those whose default configuration has layers of one kind only, which kinds they have here.
FAMILIES = {
    "Qwen3NextForCausalLM": {},
    "Qwen3_5MoeForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "NemotronHForCausalLM": {},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "KimiLinearForCausalLM": {},
    "OlmoHybridForCausalLM": {},
    "JambaForCausalLM": {},
    "ZayaForCausalLM": {},
    "MambaForCausalLM": {},
    # Entries in the cache, and what the next ones are made of among the states.
    "DeepseekV4ForCausalLM": {},
    "Glm5NextForConditionalGeneration": {},
}


@pytest.fixture(scope="module", params=some(FAMILIES, "Qwen3NextForCausalLM"))
def family(request, tmp_path_factory):
    made = getattr(transformers, request.param)
    path = tiny.write_small(tmp_path_factory.mktemp("model"), made, **FAMILIES[request.param])
    assert tiny.load(path).kv_shape.states.parts
    # Not by transformers' AutoModelForCausalLM, which does not know all of them.
    reference = made.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return tiny.load(path), reference, path


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 250) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def expected(family):
    return [tiny.reference_tokens(family[1], p, NEW_TOKENS) for p in prompts(12)]


def generate(engine, batch, **sampling):
    for index, prompt in enumerate(batch):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS, **sampling))
    outputs = tiny.run_all(engine)
    engine.scheduler.blocks.check()
    engine.scheduler.states.check()
    assert engine.scheduler.blocks.used_blocks == 0
    return [outputs[str(i)] for i in range(len(batch))]


def test_alone(family, expected):
    for prompt, tokens in zip(prompts(4), expected[:4], strict=True):
        assert generate(tiny.make_engine(family[0]), [prompt]) == [tokens]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 23}, {"max_num_seqs": 3, "kept": 0}], ids=str)
def test_together(family, expected, options):
    assert generate(tiny.make_engine(family[0], num_blocks=200, **options), prompts(12)) == expected


def test_preemption(family, expected):
    engine = tiny.make_engine(family[0], num_blocks=14)
    assert generate(engine, prompts(12)) == expected
    assert engine.scheduler.preemptions > 0


def test_a_prompt_again_goes_on_from_its_last_border(family):
    engine, rng = tiny.make_engine(family[0], num_blocks=200), random.Random(5)
    prompt = [rng.randrange(3, 250) for _ in range(300)]
    tokens = tiny.reference_tokens(family[1], prompt, NEW_TOKENS, eos_token_id=None)
    assert generate(engine, [prompt], ignore_eos=True) == [tokens]
    assert generate(engine, [prompt], ignore_eos=True) == [tokens]
    assert engine.stats.cached_tokens == 288
    # So does a conversation: what was generated has a state of its own.
    longer = [*prompt, *tokens, *prompt[:40]]
    wanted = tiny.reference_tokens(family[1], longer, NEW_TOKENS, eos_token_id=None)
    assert generate(engine, [longer], ignore_eos=True) == [wanted]
    assert engine.stats.cached_tokens == 288 + 320


def test_what_prompts_have_in_common_is_kept_once_it_is_seen(family):
    """The first to share a beginning finds blocks and no state, and leaves one for those that come after it."""
    engine, rng = tiny.make_engine(family[0], num_blocks=200), random.Random(6)
    head = [rng.randrange(3, 250) for _ in range(200)]
    for cached in (0, 0, 192, 192):
        prompt = [*head, *(rng.randrange(3, 250) for _ in range(170))]
        before = engine.stats.cached_tokens
        assert generate(engine, [prompt]) == [tiny.reference_tokens(family[1], prompt, NEW_TOKENS)]
        assert engine.stats.cached_tokens - before == cached


class Guesses:
    """Drafts the true tokens, and every now and then a wrong one."""

    name, free, limit, continues = "guesses", True, 5, True

    def __init__(self, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.truth, self.rng = truth, random.Random(2)

    def propose(self, requests, count):
        found = {}
        for request in requests:
            whole = self.truth[tuple(request.tokens[: request.prompt_len])]
            guess = whole[request.output_len : request.output_len + count]
            found[request.id] = Draft([t if self.rng.random() < 0.8 else 3 + (t + 1) % 200 for t in guess])
        return found

    def forget(self, request_id):
        pass


@pytest.mark.parametrize("options", [{}, {"num_blocks": 16, "max_batch_tokens": 60}], ids=str)
def test_drafts(family, expected, options):
    """Those that stand, and those that fall and are taken back."""
    engine, batch = tiny.make_engine(family[0], **{"num_blocks": 200, **options}), prompts(12)
    truth = {tuple(prompt): tokens for prompt, tokens in zip(batch, expected, strict=True)}
    engine.speculation = Speculation(Guesses(truth), VerifyEverything(5))
    assert generate(engine, batch) == expected
    stats = engine.speculation.stats()
    assert stats["proposed_tokens"] > stats["accepted_tokens"] > 0
    # From states that were kept behind drafts.
    assert generate(engine, batch) == expected


def test_an_answer_that_ends_within_its_drafts_keeps_no_state_of_what_was_behind(family):
    """All of them stand, the end among them; what it leaves ends at a block's border."""
    rng = random.Random(9)
    prompt = [rng.randrange(3, 250) for _ in range(60)]
    whole = tiny.reference_tokens(family[1], prompt, NEW_TOKENS, eos_token_id=None)
    engine = tiny.make_engine(family[0], num_blocks=200)
    guesses = Guesses({tuple(prompt): whole})
    guesses.rng.random = lambda: 0.0
    engine.speculation = Speculation(guesses, VerifyEverything(5))
    engine.scheduler.eos_token_ids = frozenset([whole[4]])
    engine.add(tiny.make_request("a", prompt, max_tokens=NEW_TOKENS))
    said = tiny.run_all(engine)["a"]
    assert said == whole[: whole.index(whole[4]) + 1]
    engine.scheduler.eos_token_ids = frozenset()
    engine.speculation = None
    longer = [*prompt, *said, *(rng.randrange(3, 250) for _ in range(40))]
    wanted = tiny.reference_tokens(family[1], longer, NEW_TOKENS, eos_token_id=None)
    assert generate(engine, [longer], ignore_eos=True) == [wanted]
    assert engine.stats.cached_tokens == 0


def test_questions_about_one_text_go_on_from_its_last_token(family):
    """Which lies within a block: its states are kept under the name of what lies there."""
    engine, rng = tiny.make_engine(family[0], num_blocks=200), random.Random(8)
    text = [rng.randrange(3, 250) for _ in range(70)]
    first = tiny.make_request("text", text, prefill_only=True)
    first.shared = len(text)
    engine.add(first)
    assert tiny.run_all(engine) == {"text": []}
    questions = [[*text, *(rng.randrange(3, 250) for _ in range(count))] for count in (1, 5, 40)]
    for index, question in enumerate(questions):
        request = tiny.make_request(str(index), question, max_tokens=8)
        request.shared = len(text)
        engine.add(request)
    got = tiny.run_all(engine)
    engine.scheduler.states.check()
    assert [got[str(i)] for i in range(3)] == [tiny.reference_tokens(family[1], q, 8) for q in questions]
    assert engine.stats.cached_tokens == 3 * len(text)
