"""Prompts with pictures and sounds through adapters in a worker, beside PEFT on transformers' own model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from serve_app.adapters.check import check_weights
from serve_app.adapters.config import AdapterRefused, read_config
from serve_app.adapters.shapes import base_of
from serve_app.channel.inbox import TokenInbox
from serve_app.models.loading.bare import publish
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, blob, digest_of
from serve_app.state.blobs.files import open_files
from serve_app.text.tokenizer import Tokenizer
from serve_app.wire.generate import AdapterAt
from tests.variants import some
from tests.worker.test_media import SENSES, World
from tests.worker.world import MemoryPool, start

OF_TEXT = r"(?!.*(vision|visual|audio)).*(q_proj|o_proj|down_proj)|lm_head"


def made(path: Path, folder: Path, targets: str) -> Path:
    model = get_peft_model(SENSES[path.name].Truth(path).model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=some(SENSES, "llava"))
def path(request, tmp_path):
    return SENSES[request.param].write(tmp_path / request.param, request.param)


async def test_files_are_encoded_alike_and_read_through_the_adapter(path, tmp_path):
    folder, pool, inbox = made(path, tmp_path / "adapter", OF_TEXT), MemoryPool(), TokenInbox()
    await inbox.start()
    options = {"max_batch_tokens": 48, "speculate_tokens": 4, "ngram": True, "adapters": 2}
    decode = start(path, "decode", pool, files=str(tmp_path / "files"), **options)
    plain, tuned = (SENSES[path.name].Truth(path) for _ in range(2))
    tuned.model = PeftModel.from_pretrained(tuned.model, folder).eval()
    config, weights = ((folder / name).read_bytes() for name in (CONFIG, WEIGHTS))
    digest, files = digest_of(config, weights), open_files(str(tmp_path / "files"))
    for name, data in ((CONFIG, config), (WEIGHTS, weights)):
        files.put(blob(digest, name), data)
    at = AdapterAt(digest, len(config) + len(weights))
    try:
        world = World(path.name, Tokenizer(path), plain, decode, None, inbox)
        prompts = [world.prompt("*a", "What is it?"), world.prompt("Look: ", "*b", "*c", "?"), world.prompt("None.")]
        asked = [(prompt, adapter) for prompt in prompts for adapter in (None, at)] * 2
        found = await asyncio.gather(*(world.ask(prompt, adapter=adapter) for prompt, adapter in asked))
        wanted = []
        for prompt in prompts:
            for world.truth in (plain, tuned):
                wanted.append(world.wanted(prompt))
        assert [tokens for tokens, _ in found] == wanted * 2
        assert all(without != through for without, through in zip(wanted[::2], wanted[1::2], strict=True))
    finally:
        await decode.aclose()
        await inbox.aclose()


def test_what_files_go_through_takes_no_adapter(path, tmp_path):
    publish(path, tmp_path)
    base = base_of(path, tmp_path)
    for name, targets in (("text", OF_TEXT), ("all", "all-linear")):
        folder = made(path, tmp_path / name, targets)
        told = read_config((folder / CONFIG).read_bytes())
        with (folder / WEIGHTS).open("rb") as file:
            if name == "text":
                assert check_weights(told, file, base) == 4
                continue
            with pytest.raises(AdapterRefused, match=r"that pictures or sounds go through.*exclude_modules"):
                check_weights(told, file, base)
