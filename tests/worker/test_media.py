"""Prompts with pictures and sounds in workers: real engines, encoders, decoding processes, beside transformers'
``generate``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from serve_app.api.types import GenerateRequest
from serve_app.channel.inbox import TokenInbox
from serve_app.sampling_params import SamplingParams
from serve_app.text.media import MediaFile
from serve_app.text.prompt import Prompt, read_prompt, with_files
from serve_app.text.tokenizer import Tokenizer
from serve_app.wire.generate import ArrivingCall, Failed, Generated, MediaAt, Missing, PrefillDone, Prefilled
from tests import hearing, sight
from tests.variants import some
from tests.worker.world import SALT, MemoryPool, call, prefill_call, read, start

pytestmark = pytest.mark.asyncio(loop_scope="module")
# By family, what makes checkpoints and files of its medium.
SENSES: dict[str, Any] = dict.fromkeys(sight.FAMILIES, sight) | dict.fromkeys(hearing.FAMILIES, hearing)
NEW = 12


@dataclass
class World:
    family: str
    tokenizer: Tokenizer
    truth: Any
    decode: Any
    prefill: Any
    inbox: TokenInbox

    @property
    def beside(self) -> bool:
        return self.family == "mllama"

    def prompt(self, *said: str) -> Prompt:
        """One message of the user, in which ``*a`` is the file a."""
        files = SENSES[self.family].files(self.family)
        looked = [files[word[1:]] for word in said if word[0] == "*"]
        parts = [{"type": files["a"].medium} if word[0] == "*" else {"type": "text", "text": word} for word in said]
        messages = with_files([{"role": "user", "content": parts}], looked)
        return read_prompt(self.tokenizer, GenerateRequest(
            model="", messages=messages, prompt=None, raw=False, sampling=SamplingParams()
        ))  # fmt: skip

    def wanted(self, prompt: Prompt, count: int = NEW) -> list[int]:
        return self.truth(prompt.ids.tolist(), [placed.file.data for placed in prompt.media], count)

    def call(self, prompt: Prompt, **options: Any) -> Any:
        return replace(call(prompt.ids.tolist(), self.inbox, **{"max_tokens": NEW, **options}), media=at(prompt))

    def another(self, seed: int) -> MediaFile:
        return SENSES[self.family].another(self.family, seed)

    def stats(self, work: Any) -> dict[str, int]:
        return work.media[self.another(0).medium].stats()

    async def ask(self, prompt: Prompt, **options: Any) -> tuple[list[int], Any]:
        request = self.call(prompt, **options)
        return await read(self.inbox, request, lambda: self.decode.generate(request))


def at(prompt: Prompt) -> tuple[MediaAt, ...]:
    return tuple(MediaAt(p.file.medium, p.file.data, p.file.digest, p.places, p.grid) for p in prompt.media)


@pytest.fixture(
    scope="module",
    params=some(SENSES, "mllama"),
)
def family(request):
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(family, tmp_path_factory):
    path = SENSES[family].write(tmp_path_factory.mktemp("model") / family, family)
    pool, inbox = MemoryPool(), TokenInbox()
    await inbox.start()
    # Chunks of 48 tokens cut through files, and there are too few blocks for all.
    options = {"max_batch_tokens": 48, "kv_cache_bytes": 1 << 20, "speculate_tokens": 4, "ngram": True}
    decode, prefill = start(path, "decode", pool, **options), start(path, "prefill", pool, max_batch_tokens=40)
    yield World(family, Tokenizer(path), SENSES[family].Truth(path), decode, prefill, inbox)
    for work in (decode, prefill):
        await work.aclose()
    await inbox.aclose()


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " * 2


async def test_tokens_equal_generate_wherever_files_stand(world):
    """Before, between and behind text, several of several sizes, beside requests without any."""
    prompts = [
        world.prompt("*a", "What is it?"),
        world.prompt("Look: ", "*b", " and what is it?"),
        world.prompt(LONG, "*c", "*a", " then ", "*b", LONG),
        world.prompt("No file here."),
        world.prompt("Small: ", "*d"),
        world.prompt("*e", "*e", "twice the same"),
    ]
    found = await asyncio.gather(*(world.ask(prompt) for prompt in prompts))
    assert [tokens for tokens, _ in found] == [world.wanted(prompt) for prompt in prompts]
    # Other files at the same places are other answers, or the test shows nothing.
    assert world.wanted(world.prompt("*b", "What is it?")) != world.wanted(world.prompt("*d", "What is it?"))


async def test_requests_wait_for_room_for_features_and_give_it_back(world):
    """With less than one file's, one after the other; who leaves while waiting has taken none."""
    room = world.decode.media[world.another(0).medium].room
    before, room.size = room.size, 1
    try:
        prompts = [world.prompt("*a", f"Number {i}?") for i in range(3)]
        found = await asyncio.gather(*(world.ask(prompt) for prompt in prompts))
        assert [tokens for tokens, _ in found] == [world.wanted(prompt) for prompt in prompts]
        assert world.stats(world.decode)["held_bytes"] == 0
        taken = room.take(1)
        request = world.call(world.prompt("*a", "And this one, which leaves?"))
        waits = asyncio.ensure_future(world.decode.generate(request))
        while not room._waiting:
            await asyncio.sleep(0.01)
        await world.decode.abort(request.id)
        assert isinstance(await waits, Failed) and taken.done()
        room.give(1)
        assert room.used == 0
    finally:
        room.size = before


async def test_a_second_question_neither_encodes_nor_prefills_the_file_again(world):
    first, second = (world.prompt("*b", LONG, words) for words in ("What is it?", "And the colour?"))
    await world.ask(first)
    before = world.stats(world.decode)
    tokens, result = await world.ask(second)
    assert tokens == world.wanted(second)
    places = first.media[0].places
    assert result.cached >= (len(first.ids) - 8) // 32 * 32 >= sum(places[-1])
    # Nobody has even asked for its features, unless each step attends to them.
    asked = before if not world.beside else {**before, "remembered": before["remembered"] + 1}
    assert world.stats(world.decode) == asked
    # The same words behind another file have nothing in common with them.
    new = world.another(77)
    [one] = at(second)
    request = replace(world.call(second), media=(replace(one, data=new.data, digest=new.digest),))
    tokens, result = await read(world.inbox, request, lambda: world.decode.generate(request))
    assert tokens == world.truth(second.ids.tolist(), [new.data], NEW) and result.cached <= places[0][0]


async def test_text_before_files_is_computed_again_where_it_depends_on_them(world):
    for name in "ab":
        prompt = world.prompt(LONG, f"*{name}", "?")
        tokens, result = await world.ask(prompt)
        assert tokens == world.wanted(prompt)
    assert bool(result.cached) != world.beside


async def test_a_prompt_is_prefilled_elsewhere_with_its_files(world):
    prompt = world.prompt("Elsewhere ", "*c", "*b", " and back")
    request = world.call(prompt, prefill_above=1)
    request = replace(request, prefill_above=1)
    encoded = world.stats(world.decode)["encoded"], world.stats(world.prefill)["encoded"]
    assert isinstance(await world.decode.generate(request), Missing)

    async def prefilled() -> None:
        made = replace(prefill_call(prompt.ids.tolist()), media=at(prompt))
        done = await world.prefill.prefill(made)
        assert isinstance(done, PrefillDone)
        await world.decode.prefilled(Prefilled(request.id, done.cached, done.node))

    async def arriving() -> Any:
        told = asyncio.ensure_future(prefilled())
        result = await world.decode.arriving(ArrivingCall(request.id))
        await told
        return result

    tokens, result = await read(world.inbox, request, arriving)
    assert tokens == world.wanted(prompt) and isinstance(result, Generated)
    assert result.path.prefilled >= len(prompt.ids) - 33
    # The prefill worker has encoded them, and decode has not, unless each step attends to them.
    now = world.stats(world.decode)["encoded"], world.stats(world.prefill)["encoded"]
    assert now[1] == encoded[1] + 2 and (world.beside or now[0] == encoded[0])


async def test_an_answer_goes_on_elsewhere_after_a_worker_is_lost(world):
    prompt = world.prompt("*a", "Go on. ", "*e")
    wanted = world.wanted(prompt)
    request = world.call(prompt)
    given = np.array([*prompt.ids.tolist(), *wanted[:5]], np.int32)
    request = replace(request, ids=given.tobytes(), resumed=5)
    tokens, _ = await read(world.inbox, request, lambda: world.decode.generate(request))
    assert tokens == wanted[5:]


async def test_more_than_fits_is_preempted_and_comes_to_the_same(world):
    prompts = [world.prompt(f"{number} ", "*b", "*c", LONG) for number in range(12)]
    before = world.decode.stats().numbers["preemptions"]
    found = await asyncio.gather(*(world.ask(prompt, max_tokens=40) for prompt in prompts))
    assert world.decode.stats().numbers["preemptions"] > before
    checked = (0, 11)
    assert [found[i][0] for i in checked] == [world.wanted(prompts[i], 40) for i in checked]


async def test_what_stands_for_files_is_neither_penalised_nor_told_of(world):
    """Some models have no logit of it."""
    prompt = world.prompt("*b", "How likely?")
    _, result = await world.ask(prompt, prompt_logprobs=1, repetition_penalty=1.3)
    assert isinstance(result, Generated) and len(result.prompt_logprobs.logprobs) == 4 * (len(prompt.ids) - 1)
    tokens, _ = await world.ask(prompt)
    assert tokens == world.wanted(prompt)


async def test_answers_keep_to_a_grammar(world):
    prompt = world.prompt("*a", "Which?")
    tokens, _ = await world.ask(prompt, grammar='start: "red" | "green"', ignore_eos=False)
    assert world.tokenizer.decode(tokens) in ("red", "green")


async def test_files_asked_for_at_once_are_encoded_once(world):
    new = world.another(99)
    prompt = world.prompt("*b", "At once?")
    shown = tuple(replace(one, data=new.data, digest=new.digest) for one in at(prompt))
    before = world.stats(world.decode)["encoded"]
    calls = [replace(world.call(prompt), media=shown) for _ in range(6)]
    found = await asyncio.gather(*(read(world.inbox, c, lambda c=c: world.decode.generate(c)) for c in calls))
    assert world.stats(world.decode)["encoded"] == before + 1
    assert [tokens for tokens, _ in found] == [world.truth(prompt.ids.tolist(), [new.data], NEW)] * 6


async def test_no_tenant_learns_what_another_has_sent(world):
    """Neither from the files that are remembered nor from the K/V."""
    prompt = world.prompt("*b", "Whose is it? " * 12)
    first, _ = await world.ask(prompt)
    for salt, more in ((SALT, 0), (b"another tenant's salt", 1), (b"another tenant's salt", 0)):
        before = world.stats(world.decode)["encoded"]
        request = replace(world.call(prompt), salt=salt)
        again, result = await read(world.inbox, request, lambda r=request: world.decode.generate(r))
        assert again == first and world.stats(world.decode)["encoded"] == before + more
        assert bool(result.cached) != bool(more)


@pytest.mark.parametrize("wrong", ["no such file", "fewer places", "behind the end", "over each other"])
async def test_what_cannot_be_is_refused_for_good(world, wrong):
    prompt = world.prompt("*a", "What?")
    [one] = at(prompt)
    (first, count), *more = one.places
    changed = {
        "no such file": replace(one, data=b"no such file", digest=b"0" * 32),
        "fewer places": replace(one, places=((first, count - 1), *more), digest=b"1" * 32),
        "behind the end": replace(one, places=((len(prompt.ids), count),)),
        "over each other": replace(one, places=((first, count), (first, count))),
    }
    result = await world.decode.generate(replace(world.call(prompt), media=(changed[wrong],)))
    assert isinstance(result, Failed) and result.refused
    assert "picture" in result.error or "sound" in result.error or "audio" in result.error
