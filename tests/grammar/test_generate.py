"""A model under a grammar writes what the grammar describes, whatever else the engine is doing."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from serve_app.engine.request import FINISH_LENGTH, FINISH_REFUSED, FINISH_STOP
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.forced import ForcedProposer
from serve_app.engine.speculation.proposer import Draft
from serve_app.engine.speculation.speculate import Speculation
from serve_app.grammar.rules import choice_rule, grammar, json_rule, regex_rule
from tests import tiny
from tests.grammar.schemas import random_schema
from tests.variants import some

EVERYTHING = grammar("<[*]>*", {})


def add(engine, name, text, *, prompt=(5, 60, 61), **sampling):
    params = {"temperature": 1.0, "max_tokens": 300, "grammar": text, "seed": int(name) if name.isdigit() else 0}
    request = tiny.make_request(name, list(prompt), **{**params, **sampling})
    engine.runner.masks.compile(request)
    engine.add(request)
    return request


def run(engine, max_steps=4000):
    """Tokens and how each request ended."""
    tokens, ends, errors = {}, {}, {}
    for _ in range(max_steps):
        if not engine.has_work:
            engine.scheduler.blocks.check()
            assert engine.scheduler.blocks.used_blocks == 0
            return tokens, ends, errors
        for output in engine.step():
            got = tokens.setdefault(output.request_id, [])
            assert output.offset == len(got)
            got += output.token_ids
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
                errors[output.request_id] = output.error
    raise AssertionError("still busy")


def check_schemas(make_engine, tokenizer, closing, seeds):
    engine = make_engine(max_num_seqs=16)
    schemas = {str(seed): random_schema(seed) for seed in seeds}
    for name, schema in schemas.items():
        add(engine, name, grammar(json_rule(schema), {}), logit_bias=closing)
    tokens, ends, errors = run(engine, 200_000)
    assert set(ends.values()) <= {FINISH_STOP, FINISH_LENGTH}, errors
    finished = [name for name, end in ends.items() if end == FINISH_STOP]
    for name in finished:
        text = tokenizer.decode(tokens[name])
        jsonschema.Draft202012Validator(schemas[name]).validate(json.loads(text)), text
    # Otherwise the test would say nothing.
    assert len(finished) > 0.8 * len(schemas)


def test_what_is_written_validates(engine, tokenizer, closing):
    check_schemas(engine, tokenizer, closing, range(48))


@pytest.mark.slow
def test_what_is_written_validates_for_a_thousand_schemas(engine, tokenizer, closing):
    check_schemas(engine, tokenizer, closing, range(1000, 2000))


def test_a_grammar_that_allows_everything_changes_nothing(engine):
    def outputs(text, **sampling):
        made = engine()
        for i in range(2):
            add(made, str(i), text, prompt=[5, *range(30 + i, 50 + i)], max_tokens=10, **sampling)
        return run(made)

    for sampling in ({"temperature": 0.0}, {"top_p": 0.95}, {"temperature": 0.0, "repetition_penalty": 1.3}):
        assert outputs(EVERYTHING, **sampling) == outputs(None, **sampling)


class Guesser:
    """Proposes the right answer with errors in it, and now and then what no grammar allows."""

    name, free, limit, continues = "guesser", True, 16, True

    def __init__(self, answers):
        self.answers = answers
        self.rng = random.Random(3)

    def propose(self, requests, count):
        out = {}
        for request in requests:
            left = self.answers[request.id][request.output_len + len(request.draft) :][:count]
            out[request.id] = Draft([self.rng.randrange(7, 6000) if self.rng.random() < 0.2 else t for t in left])
        return out

    def forget(self, request_id):
        pass


def test_what_a_grammar_forces_needs_no_draft_model(engine, grammars, tokenizer):
    keys = [f"a rather long key {i}" for i in range(4)]
    schema = {"type": "object", "properties": dict.fromkeys(keys, {"type": "boolean"}), "required": keys,
              "additionalProperties": False}  # fmt: skip
    text = grammar(json_rule(schema), {})
    # A random model divides text into tokens at random; one that was trained takes the usual ones.
    usual = set(tokenizer.encode(json.dumps(dict.fromkeys(keys, True)), add_special_tokens=False).tolist())

    def outputs(**options):
        made = engine(**options)
        add(made, "1", text, temperature=0.0, logit_bias={token: 50.0 for token in usual})
        return run(made)[0]["1"], made.stats.steps

    plain, steps = outputs()
    forced, fewer = outputs(speculation=Speculation(ForcedProposer(), VerifyEverything(16)))
    assert forced == plain and json.loads(tokenizer.decode(forced)) and fewer < steps


def test_forced_tokens_follow_drafts(grammars, tokenizer):
    matcher = grammars.matcher(grammar('"abc" ("{x}" | "[yyyy]")', {}))
    begun = tokenizer.encode("abc", add_special_tokens=False).tolist()
    drafted = begun + tokenizer.encode("[", add_special_tokens=False).tolist()
    assert tokenizer.decode(drafted + matcher.forced(drafted)) == "abc[yyyy]"
    assert matcher.forced([5]) == []
    assert matcher.advance(begun) == len(begun) and not matcher.ended and matcher.error is None


@pytest.mark.parametrize(
    "sampling", some([{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 20}], {"temperature": 0.0})
)
def test_drafts_change_nothing(engine, tokenizer, closing, sampling):
    def outputs(speculation=None):
        made = engine(max_num_seqs=8, **({"speculation": speculation} if speculation else {}))
        for seed in range(100, 112):
            text = grammar(json_rule(random_schema(seed)), {})
            add(made, str(seed), text, logit_bias=closing, max_tokens=80, logprobs=1, **sampling)
        return run(made), made

    (expected, ends, _), _ = outputs()
    speculation = Speculation([ForcedProposer(), Guesser(expected)], VerifyEverything(5))
    (drafted, drafted_ends, _), made = outputs(speculation)
    assert drafted == expected and drafted_ends == ends
    assert speculation.stats()["accepted_tokens"] > 100
    assert made.stats.steps < sum(map(len, expected.values())) / 3


def test_preempted_requests_go_on_where_they_were(engine, closing):
    def outputs(**options):
        made = engine(max_num_seqs=8, **options)
        for seed in range(200, 208):
            text = grammar(json_rule(random_schema(seed)), {})
            add(made, str(seed), text, prompt=[seed] * 30, logit_bias=closing, max_tokens=120)
        return run(made), made.scheduler.preemptions

    (roomy, _, _), none = outputs()
    (tight, _, _), some = outputs(num_blocks=10)
    assert none == 0 and some > 0
    assert tight == roomy


def test_another_worker_continues_from_the_tokens(engine, closing):
    text = grammar(json_rule(random_schema(5)), {})
    first = engine()
    add(first, "7", text, logit_bias=closing)
    (whole, _, _) = run(first)
    assert len(whole["7"]) > 6
    for cut in (1, len(whole["7"]) // 2, len(whole["7"]) - 1):
        second = engine()
        request = tiny.make_request("7", [5, 60, 61], temperature=1.0, max_tokens=300, grammar=text, seed=7,
                                    logit_bias=closing)  # fmt: skip
        request.tokens += whole["7"][:cut]
        request.resumed = cut
        second.runner.masks.compile(request)
        second.add(request)
        rest = []
        while second.has_work:
            rest += [token for output in second.step() for token in output.token_ids]
        assert rest == whole["7"][cut:]


def test_choices_and_regexes(engine, tokenizer):
    made = engine()
    choices = ["yes", "no", "yes, but", 'a "quoted" one', "ünïcode/slash"]
    for seed in range(6):
        add(made, str(seed), grammar(choice_rule(choices), {}))
        add(made, str(seed + 10), grammar(regex_rule(r"^[A-Z]{3}-\d{4}(/[a-f]{2})?$"), {}))
    tokens, ends, _ = run(made)
    for name, end in ends.items():
        said = tokenizer.decode(tokens[name])
        assert end == FINISH_STOP
        assert said in choices if int(name) < 10 else re.fullmatch(r"[A-Z]{3}-\d{4}(/[a-f]{2})?", said), said


def test_the_last_token_of_the_limit_may_complete_it(engine, tokenizer):
    made = engine()
    ids = tokenizer.encode("yes", add_special_tokens=False).tolist()
    add(made, "1", grammar('"yes"', {}), logit_bias={t: 30.0 for t in ids}, temperature=0.0, max_tokens=len(ids))
    add(made, "2", grammar('"yes" "!"{40}', {}), temperature=0.0, max_tokens=2)
    _, ends, _ = run(made)
    assert ends == {"1": FINISH_STOP, "2": FINISH_LENGTH}


def test_eos_ends_what_may_end_even_if_it_is_to_be_ignored(engine):
    made = engine()
    add(made, "1", grammar("/[a-z]*/", {}), logit_bias={2: 100.0}, ignore_eos=True)
    tokens, ends, _ = run(made)
    assert ends == {"1": FINISH_STOP} and tokens["1"] == [2]


def test_bias_cannot_break_a_grammar(engine, tokenizer):
    made = engine()
    add(made, "1", grammar('"yes" | "no"', {}), logit_bias={i: 100.0 for i in range(300, 320)}, temperature=0.0)
    tokens, _, _ = run(made)
    assert tokenizer.decode(tokens["1"]) in ("yes", "no")


def test_logprobs_stay_the_models(engine):
    free, bound = engine(), engine()
    add(free, "1", None, max_tokens=1, logprobs=3)
    add(bound, "1", grammar('"yes"', {}), max_tokens=1, logprobs=3)
    [plain], [masked] = free.step(), bound.step()
    assert plain.logprobs[0].top == masked.logprobs[0].top
    assert masked.logprobs[0].logprob < plain.logprobs[0].top[-1][1]


HEAVY = {"A": "/(a|b)*a(a|b){10}/ & /(a|b)*b(a|b){11}/ & ~/.*aba.*/"}


def test_one_heavy_grammar_ends_alone(engine, closing):
    """A grammar that asks for too much work is refused, or ends its request with the reason on the way there; nobody
    else notices."""
    made = engine()
    with pytest.raises(ValueError, match="too much work"):
        add(made, "0", grammar("A", HEAVY))
    add(made, "1", grammar('"=" "+" "=" "+" A', HEAVY), max_tokens=100)
    add(made, "2", grammar(json_rule(random_schema(5)), {}), logit_bias=closing)
    _, ends, errors = run(made)
    assert ends == {"1": FINISH_REFUSED, "2": FINISH_STOP} and "too much work" in errors["1"]


def test_a_request_is_not_added_before_its_grammar_is_compiled(engine):
    made = engine()
    with pytest.raises(ValueError, match="not compiled"):
        made.add(tiny.make_request("1", [5], grammar=EVERYTHING))
