"""Tiny random pipelines of diffusers, of each family, in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf

WORDS = ["a", "red", "cat", "dog", "on", "the", "mat"]
HIDDEN = 16


def clip_tokenizer(folder: Path) -> tf.CLIPTokenizer:
    """Knows the letters alone."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    names = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return tf.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def clip_config(**more: Any) -> tf.CLIPTextConfig:
    return tf.CLIPTextConfig(
        vocab_size=54, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=52, eos_token_id=53, pad_token_id=53, **more,
    )  # fmt: skip


def vae(latents: int = 4, scale: float = 0.18, blocks: int = 2) -> Any:
    """A latent has 2 by 2 pixels with two ``blocks``, and twice the side with each further one."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=[8] * blocks, in_channels=3, out_channels=3, norm_num_groups=4, latent_channels=latents,
        down_block_types=["DownEncoderBlock2D"] * blocks, up_block_types=["UpDecoderBlock2D"] * blocks,
        scaling_factor=scale,
        **({"shift_factor": 0.1, "use_quant_conv": False, "use_post_quant_conv": False} if latents != 4 else {}),
    )  # fmt: skip


def unet(channels: int = 4, width: int = HIDDEN, **more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=16, in_channels=channels, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=width, norm_num_groups=4, attention_head_dim=4, **more,
    )  # fmt: skip


def diffusion(folder: Path, *, channels: int = 4, lcm: bool = False, blocks: int = 2) -> Any:
    """Like Stable Diffusion 1.5; with 9 ``channels`` one that fills in masks; with ``lcm`` one of few steps."""
    import diffusers

    torch.manual_seed(1)
    scheduler = diffusers.LCMScheduler() if lcm else diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    fills = diffusers.StableDiffusionInpaintPipeline
    made = (fills if channels == 9 else diffusers.StableDiffusionPipeline)(
        vae=vae(blocks=blocks), text_encoder=tf.CLIPTextModel(clip_config()), tokenizer=clip_tokenizer(folder / "made"),
        unet=unet(channels), scheduler=scheduler, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    return _saved(made, folder)


def diffusion_xl(folder: Path) -> Any:
    import diffusers

    torch.manual_seed(2)
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "use_linear_projection": True}
    made = diffusers.StableDiffusionXLPipeline(
        vae=vae(), text_encoder=tf.CLIPTextModel(clip_config()),
        text_encoder_2=tf.CLIPTextModelWithProjection(clip_config(projection_dim=HIDDEN)),
        tokenizer=clip_tokenizer(folder / "made"), tokenizer_2=clip_tokenizer(folder / "made2"),
        unet=unet(width=2 * HIDDEN, projection_class_embeddings_input_dim=6 * 8 + HIDDEN, **more),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip
    return _saved(made, folder)


def flux(folder: Path) -> Any:
    import diffusers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(3)
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    told = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    told.pre_tokenizer = pre_tokenizers.Whitespace()
    t5 = tf.PreTrainedTokenizerFast(
        tokenizer_object=told, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )
    config = tf.T5Config(vocab_size=len(words), d_model=HIDDEN, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=HIDDEN, pooled_projection_dim=HIDDEN, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    made = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae(4), tokenizer_2=t5,
        text_encoder=tf.CLIPTextModel(clip_config()), tokenizer=clip_tokenizer(folder / "made"),
        text_encoder_2=tf.T5EncoderModel(config), transformer=transformer,
    )  # fmt: skip
    made.vae.register_to_config(shift_factor=0.1)
    return _saved(made, folder)


def _saved(pipeline: Any, folder: Path) -> Any:
    """Read again from ``folder``, as anybody would."""
    pipeline.save_pretrained(folder, safe_serialization=True)
    for made in ("made", "made2"):
        for path in (folder / made).glob("*"):
            path.unlink()
        if (folder / made).is_dir():
            (folder / made).rmdir()
    found = type(pipeline).from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    found.set_progress_bar_config(disable=True)
    return found
