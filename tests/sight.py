"""Tiny random checkpoints of families that see, with tokenizer, template and processor, and what transformers makes of
pictures with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer as Backend
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    Llama4VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.models.loading.miniature import randomise
from serve_app.predict.tiles import TileProcessor, cuts_tiles
from serve_app.text.pictures import Picture

MARKS = [
    "<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<image_soft_token>", "<end_of_image>",
    "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>",
]  # fmt: skip
# The shipped tokenizer's, before the marks.
OWN = 6144
TEXT = {
    "vocab_size": OWN + 24, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SEES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}MARK{% endif %}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Positions are three numbers, which follow from a picture's grid.
TURNING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
FAMILIES = ("llava", "mistral3", "gemma3", "llama4", "mllama", *TURNING)
# What each template writes for a picture.
MARK = {
    "llava": "<image>", "mistral3": "[IMG]", "gemma3": "<start_of_image>", "llama4": "<|image|>", "mllama": "<|image|>",
} | dict.fromkeys(TURNING, "<|vision_start|><|image_pad|><|vision_end|>")  # fmt: skip


def write(path: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    """A random float32 checkpoint of ``family`` in ``path``; ``sizes`` of one of Qwen's in place of those of `TEXT`."""
    torch.manual_seed(seed)
    ends = {n: TEXT[n] for n in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")}
    if family == "llava":
        vision = CLIPVisionConfig(**SEES, image_size=32, patch_size=8, projection_dim=32)
        config: Any = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=OWN, **ends)
        model: Any = LlavaForConditionalGeneration(config)
        settings = {
            "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 32},
            "do_center_crop": True, "crop_size": {"height": 32, "width": 32},
        }  # fmt: skip
        processor = {"processor_class": "LlavaProcessor", "patch_size": 8, "num_additional_image_tokens": 1,
                     "vision_feature_select_strategy": "default", "image_token": MARKS[0]}  # fmt: skip
    elif family == "gemma3":
        vision = SiglipVisionConfig(**SEES, image_size=64, patch_size=8)
        # Local layers see fewer tokens than a picture's and what stands before it have.
        text = Gemma3TextConfig(**{**TEXT, "num_hidden_layers": 4}, sliding_window=24, sliding_window_pattern=2,
                                query_pre_attn_scalar=16)  # fmt: skip
        config = Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=16, boi_token_index=OWN + 4,
            image_token_index=OWN + 5, eoi_token_index=OWN + 6, **ends,
        )  # fmt: skip
        model = Gemma3ForConditionalGeneration(config)
        settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64},
                    "image_seq_length": 16}  # fmt: skip
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": 16}
    elif family == "llama4":
        seen4 = Llama4VisionConfig(**SEES | {"intermediate_size": 128}, image_size=32, patch_size=8,
                                   projector_input_dim=48, projector_output_dim=48, vision_output_dim=48)  # fmt: skip
        # Local layers see fewer tokens than some pictures have, and layers without rotation are scaled by position.
        text4 = Llama4TextConfig(
            **TEXT | {"num_hidden_layers": 4}, attention_chunk_size=24, no_rope_layers=[1, 1, 1, 0], floor_scale=16,
            num_local_experts=2, interleave_moe_layer_step=2, intermediate_size_mlp=96,
        )  # fmt: skip
        config = Llama4Config(vision_config=seen4, text_config=text4, boi_token_index=OWN + 12,
                              eoi_token_index=OWN + 13, image_token_index=OWN + 11, **ends)  # fmt: skip
        model = Llama4ForConditionalGeneration(config)
        settings = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 32, "width": 32},
                    "max_patches": 4}  # fmt: skip
        processor = {"processor_class": "Llama4Processor", "patch_size": 8, "pixel_shuffle_ratio": 0.5}
    elif family == "mllama":
        model, settings, processor = _crossing(ends)
    elif family in TURNING:
        model, settings, processor = _turning(family, ends, sizes)
    else:
        seen = PixtralVisionConfig(**SEES, head_dim=8, image_size=64, patch_size=4)
        config = Mistral3Config(
            vision_config=seen,
            text_config=MistralConfig(**TEXT, sliding_window=None),
            image_token_id=OWN + 1,
            spatial_merge_size=2,
            **ends,
        )
        model = Mistral3ForConditionalGeneration(config)
        settings = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 4}
        processor = {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2}
    randomise(model)
    for name, gate in model.named_parameters():
        if "cross_attn" in name and name.endswith("gate"):  # layers that do something
            gate.data.fill_(0.7)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    (path / "processor_config.json").write_text(json.dumps(processor))
    write_tokenizer(path, MARK[family])
    return path


def _crossing(ends: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Llama 3.2 Vision, whose token for a picture has no logit."""
    seen = {**SEES, "num_global_layers": 1, "attention_heads": 4, "vision_output_dim": 64, "image_size": 32,
            "patch_size": 8, "max_num_tiles": 4, "intermediate_layers_indices": [1]}  # fmt: skip
    del seen["num_attention_heads"]
    text = {**TEXT, "vocab_size": OWN + 10, "num_hidden_layers": 5, "cross_attention_layers": [1, 3]}
    config = MllamaConfig(vision_config=seen, text_config=text, image_token_index=OWN + 10, **ends)
    settings = {"image_processor_type": "MllamaImageProcessor", "size": {"height": 32, "width": 32},
                "max_image_tiles": 4}  # fmt: skip
    return MllamaForConditionalGeneration(config), settings, {"processor_class": "MllamaProcessor"}


def _turning(family: str, ends: dict[str, Any], sizes: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A model of Qwen's, the settings of its processor of pictures, and of all of it."""
    text = {**TEXT, **sizes}
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4,
                               "mrope_section": [half - 2 * (3 * half // 8), *[3 * half // 8] * 2]}  # fmt: skip
    shared = {"image_token_id": OWN + 8, "vision_start_token_id": OWN + 7, "vision_end_token_id": OWN + 9,
              "video_token_id": OWN + 20, "text_config": text, **ends}  # fmt: skip
    seen: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
    if family == "qwen3_5":
        # A part of each head is rotated; every second layer keeps a state.
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4,
                 "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
        seen |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"],
                 "num_position_embeddings": 16}  # fmt: skip
        model: Any = Qwen3_5ForConditionalGeneration(Qwen3_5Config(vision_config=seen, **shared))
    elif family.startswith("qwen3"):
        # Two layers of the decoder get more of a picture.
        seen |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"],
                 "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
        if family == "qwen3_vl":
            model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=seen, **shared))
        else:
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2}
            model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(vision_config=seen, **shared))
    elif family == "qwen2_vl":
        del text["head_dim"]  # they have none of their own
        seen |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=seen, **shared))
    else:
        del text["head_dim"]
        # Windows of 2 by 2 merged patches in the first layer.
        seen |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"], "window_size": 16,
                 "fullatt_block_indexes": [1]}  # fmt: skip
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=seen, **shared))
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
                "min_pixels": 256, "max_pixels": 3600}  # fmt: skip
    return model, settings, {"processor_class": "Qwen2VLProcessor"}


def write_tokenizer(path: Path, mark: str, marks: Sequence[str] = MARKS) -> None:
    """The shipped tokenizer with ``marks``, and a template that writes ``mark`` for a file."""
    source = PROJECT_ROOT / "checkpoints" / "pico-instruct"
    backend = Backend.from_file(str(source / "tokenizer.json"))
    backend.add_special_tokens(list(marks))
    backend.save(str(path / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.replace("MARK", mark)
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of blocks of colour, which are not all alike to an encoder."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (5, 5, 3), generator=generator, dtype=torch.uint8).numpy()
    out = BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


def looked_at(width: int, height: int, seed: int = 0) -> Picture:
    file = picture(width, height, seed)
    return Picture(file, sha256(file).digest(), width, height)


def files(family: str) -> dict[str, Picture]:
    """Of several sizes, by name."""
    sizes = {"a": (40, 30), "b": (64, 64), "c": (25, 70), "d": (9, 9), "e": (90, 33)}
    return {name: looked_at(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}


def another(family: str, seed: int) -> Picture:
    """As many places as the one named b has."""
    return looked_at(64, 64, seed)


class Truth:
    """transformers' own way from files and token ids to an answer."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # Of Llama 4's, which needs torchvision, tests/predict/test_tiles.py has what it gives.
        self.tiles = TileProcessor(path) if cuts_tiles(path) else None
        self.processor = None if self.tiles else AutoImageProcessor.from_pretrained(path, backend="pil")
        self.crosses = self.model.config.model_type == "mllama"
        self.merged = 8 if self.model.config.model_type == "mistral3" else 0

    def seen(self, files: list[bytes]) -> dict[str, Any]:
        """What the processor makes of the pictures of one prompt."""
        more = {"patch_size": {"height": self.merged, "width": self.merged}} if self.merged else {}
        images = [Image.open(BytesIO(file)).convert("RGB") for file in files]
        if self.tiles is not None:
            return {"pixel_values": torch.cat([self.tiles(image)["pixel_values"][0] for image in images]).float()}
        found = self.processor(images=[images] if self.crosses else images, return_tensors="pt", **more)
        if self.crosses:
            return dict(found)
        return {name: found[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in found}

    def __call__(self, ids: list[int], files: list[bytes], count: int) -> list[int]:
        """The first ``count`` tokens of the answer, greedily."""
        given = torch.tensor([ids])
        more = self.seen(files) if files else {}
        if self.model.config.model_type == "gemma3":
            more["token_type_ids"] = (given == self.model.config.image_token_id).long()
        if self.model.config.model_type in TURNING:
            more["mm_token_type_ids"] = (given == self.model.config.image_token_id).long()
        if self.crosses and files:
            at = get_cross_attention_token_mask(ids, self.model.config.image_token_index)
            dense = convert_sparse_cross_attention_mask_to_dense([at], more.pop("num_tiles"), 4, len(ids))
            more["cross_attention_mask"] = torch.from_numpy(dense)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
                eos_token_id=None, **more,
            )  # fmt: skip
        return out[0, len(ids) :].tolist()
