"""Pictures in prompts: the same tokens as transformers' processors, in places that nobody's text can fake."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from serve_app.api.errors import ContextTooLong, InvalidInput
from serve_app.api.fields.turn import CONTINUED
from serve_app.api.types import GenerateRequest
from serve_app.predict.tiles import TileProcessor
from serve_app.sampling_params import SamplingParams
from serve_app.text import prompt as prompts
from serve_app.text.media import NoMedia
from serve_app.text.pictures import Merged, Picture
from serve_app.text.prompt import Prompt, read_prompt, with_files
from serve_app.text.tokenizer import Tokenizer
from tests import sight

SIZES = [(40, 30), (64, 64), (25, 70), (9, 9), (90, 33), (500, 40), (64, 8), (65, 8), (1, 1), (33, 129)]


@pytest.fixture(scope="module", params=sight.FAMILIES)
def folder(request, tmp_path_factory):
    """A folder without weights: what a gateway has."""
    path = sight.write(tmp_path_factory.mktemp("model") / request.param, request.param)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def sized(width: int, height: int) -> Picture:
    return Picture(b"", b"%d x %d" % (width, height), width, height)


def asked(*parts: str | tuple[int, int], **fields: Any) -> GenerateRequest:
    """One message of the user; pairs are pictures of that size."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    said = [*fields.pop("before", []), {"role": "user", "content": content}, *fields.pop("behind", [])]
    messages = with_files(said, [sized(*p) for p in parts if not isinstance(p, str)])
    return GenerateRequest(
        model="", messages=messages, prompt=None, raw=False, sampling=SamplingParams(max_tokens=8), **fields
    )


def covered(prompt: Prompt) -> list[int]:
    return [i for placed in prompt.media for first, count in placed.places for i in range(first, first + count)]


def test_the_number_of_tokens_is_what_the_processor_makes(folder, tokenizer):
    tiled = folder.name == "llama4"
    processor = TileProcessor(folder) if tiled else AutoImageProcessor.from_pretrained(folder, backend="pil")
    if folder.name == "mistral3":
        with pytest.raises(InvalidInput, match="1000 by 10 pixels is too thin"):  # as its processor fails
            read_prompt(tokenizer, asked("x", (1000, 10)))
    for width, height in SIZES:
        image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        if folder.name in ("gemma3", "mllama"):
            wanted = 16 if folder.name == "gemma3" else 1
        elif tiled:
            wanted = 4 * processor(images=image)["pixel_values"].shape[1]
        elif folder.name == "llava":
            made = processor(images=image, return_tensors="np")["pixel_values"][0]
            wanted = (made.shape[1] // 8) * (made.shape[2] // 8)
        elif folder.name in sight.TURNING:
            made = processor(images=image, return_tensors="np")["image_grid_thw"][0]
            wanted = int(np.prod(made)) // 4
            assert tokenizer.pictures.grid(width, height) == (made[1] // 2, made[2] // 2)
        else:
            made = processor(images=image, return_tensors="np", patch_size={"height": 8, "width": 8})
            wanted = int(np.prod(np.asarray(made["image_sizes"][0]) // 8))
        found = read_prompt(tokenizer, asked("x", (width, height), "y"))
        assert len(covered(found)) == wanted and (found.ids[covered(found)] == tokenizer.pictures.token).all()
        assert (np.delete(found.ids, covered(found)) != tokenizer.pictures.token).all()


def test_prompts_are_those_of_the_models_own_processor(tmp_path):
    """Of Pixtral's, which needs torchvision, the rows are checked below."""
    path = sight.write(tmp_path / "llava", "llava")
    fast = PreTrainedTokenizerFast.from_pretrained(path)
    processor = LlavaProcessor(
        AutoImageProcessor.from_pretrained(path, backend="pil"), fast, chat_template=fast.chat_template,
        **{k: v for k, v in json.loads((path / "processor_config.json").read_text()).items() if k != "processor_class"},
    )  # fmt: skip
    parts = ["Is ", (40, 30), " like", (25, 70), (9, 9), " or not?"]
    images = [Image.new("RGB", size) for size in parts if not isinstance(size, str)]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    theirs = processor(images=images, text=text, add_special_tokens=False)["input_ids"][0]
    assert read_prompt(Tokenizer(path), asked(*parts)).ids.tolist() == list(theirs)


def test_rows_of_pixtral_end_as_its_processor_ends_them(tmp_path):
    tokenizer = Tokenizer(sight.write(tmp_path / "mistral3", "mistral3"))
    found = read_prompt(tokenizer, asked("a", (25, 17), "b"))
    ids = found.ids.tolist()
    at = ids.index(sight.OWN + 1)
    mark, gap, end = sight.OWN + 1, sight.OWN + 2, sight.OWN + 3
    assert ids[at : at + 15] == [*[mark] * 4, gap, *[mark] * 4, gap, *[mark] * 4, end]
    assert found.media[0].places == ((at, 4), (at + 5, 4), (at + 10, 4))


def test_pictures_of_gemma_stand_between_lines(tmp_path):
    tokenizer = Tokenizer(sight.write(tmp_path / "gemma3", "gemma3"))
    found = read_prompt(tokenizer, asked("a", (25, 17), "b"))
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert f"a\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\nb" in text


def test_tiles_of_llama_are_told_apart(tmp_path):
    """As `Llama4Processor._prompt_split_image` writes them, which needs torchvision."""
    tokenizer = Tokenizer(sight.write(tmp_path / "llama4", "llama4"))
    tile = "<|patch|>" * 4
    for size, tiles in (
        ((9, 9), ""),
        ((40, 30), f"{tile}<|tile_x_separator|>{tile}<|tile_y_separator|>"),
        ((25, 70), f"{tile}<|tile_y_separator|>" * 3),
        ((64, 64), f"{tile}<|tile_x_separator|>{tile}<|tile_y_separator|>" * 2),
    ):
        found = read_prompt(tokenizer, asked("a", size, "b"))
        text = tokenizer.decode(found.ids, skip_special_tokens=False)
        assert f"a<|image_start|>{tiles}<|image|>{tile}<|image_end|>b" in text
        assert [count for _, count in found.media[0].places] == [4] * text.count(tile)


def test_pictures_keep_their_shape_within_a_number_of_pixels(tmp_path):
    """Qwen's sizes are resized as its processor does it, whatever they are."""
    rule = Merged("", "", 0, 28, 56 * 56, 28 * 28 * 1280)
    random = np.random.default_rng(3)
    sizes = [(int(w), int(h)) for w, h in np.exp(random.uniform(0, 9.5, (400, 2))).astype(int) + 1]
    for width, height in [*sizes, (14, 42), (42, 70), (1, 200), (200, 1), (1, 201), (28 * 1280, 28)]:
        if max(width, height) > 200 * min(width, height):
            assert rule.grid(width, height) == (0, 0)
            with pytest.raises(ValueError, match="aspect ratio"):
                smart_resize(height, width)
            continue
        high, wide = smart_resize(height, width)
        assert rule.grid(width, height) == (high // 28, wide // 28)
    tokenizer = Tokenizer(sight.write(tmp_path / "qwen2_vl", "qwen2_vl"))
    with pytest.raises(InvalidInput, match="1000 by 4 pixels is too thin"):
        read_prompt(tokenizer, asked("x", (1000, 4)))
    found = read_prompt(tokenizer, asked("a", (25, 17), "b", (40, 30)))
    assert [placed.grid for placed in found.media] == [(2, 3), (4, 5)]
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert f"a<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>b" in text


def test_pictures_beyond_the_window_are_refused_before_anything_is_written(tokenizer, monkeypatch):
    monkeypatch.setattr(prompts, "expand", None)
    with pytest.raises(ContextTooLong):
        count = 10 if tokenizer.pictures.tokens_of(sized(64, 64)) > 1 else 110
        read_prompt(tokenizer, asked(*[(64, 64)] * count), context_window=100)
    with pytest.raises(InvalidInput, match="can't be cut"):
        read_prompt(tokenizer, asked("x", (64, 64), keep_tokens=5))


def test_text_that_spells_a_mark_is_text(tokenizer):
    mark = tokenizer.pictures.mark
    found = read_prompt(tokenizer, asked(f"{mark} and", (40, 30), f"{mark[:3]}", f"{mark[3:]}"))
    assert len(found.media) == 1
    plain = read_prompt(tokenizer, asked("x", (40, 30)))
    count = tokenizer.pictures.token
    assert (found.ids == count).sum() == (plain.ids == count).sum()
    assert mark in tokenizer.decode(found.ids, skip_special_tokens=True)


def test_pictures_stay_with_their_messages(tokenizer):
    """Where the oldest go, their pictures go; an answer that goes on has them before it."""
    old = [{"role": "user", "content": "one two three " * 20}, {"role": "assistant", "content": "yes"}]
    whole = read_prompt(tokenizer, asked("x", (64, 64), before=old))
    shorter = read_prompt(
        tokenizer, asked("x", (64, 64), before=old, drop_oldest=True), context_window=len(whole.ids) - 1
    )
    assert shorter.ids.tolist() == read_prompt(tokenizer, asked("x", (64, 64))).ids.tolist()
    assert len(shorter.media) == len(whole.media) == 1
    begun = [{"role": "assistant", "content": "It is"}]
    goes_on = read_prompt(tokenizer, asked("x", (64, 64), behind=begun, template_kwargs=CONTINUED))
    assert tokenizer.decode(goes_on.ids[-2:]) == "It is" and len(goes_on.media) == 1


def test_what_cannot_be_is_refused(tokenizer, tmp_path):
    with pytest.raises(InvalidInput, match="can't be cut"):
        read_prompt(tokenizer, asked("x", (64, 64), keep_tokens=5))
    with pytest.raises(ContextTooLong):
        read_prompt(tokenizer, asked("word " * 3000, (64, 64)), context_window=100)
    hiding = sight.write(tmp_path / "llava", "llava")
    config = json.loads((hiding / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.role }}{% endfor %}"
    (hiding / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="shows 0 of the 1 pictures"):
        read_prompt(Tokenizer(hiding), asked("x", (64, 64)))


@pytest.mark.parametrize(("change", "why"), [
    ({"model_type": "internvl"}, "internvl with pictures is not supported"),
    ({"vision_config": None}, "no processor"),
    ({"image_token_id": 5, "image_token_index": 5}, "is no control token"),
    ({"image_token_id": None, "image_token_index": None}, "names no token"),
])  # fmt: skip
def test_models_whose_way_is_not_known_are_named(tmp_path, change, why):
    path = sight.write(tmp_path / "llava", "llava")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(NoMedia, match=why):
        _ = Tokenizer(path).pictures


def test_templates_that_want_parts_get_parts(tmp_path):
    path = sight.write(tmp_path / "llava", "llava")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>"
        "{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
        "{% endfor %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(path)
    assert tokenizer.wants_parts and not Tokenizer(sight.write(tmp_path / "other", "llava")).wants_parts
    text = asked(before=[{"role": "system", "content": "Be brief."}])
    text.messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.decode(read_prompt(tokenizer, text).ids) == "system:Be brief.user:Hi"
