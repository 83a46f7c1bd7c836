"""A small draft model with its target's vocabulary, taught on the target's own answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.distill.answers import Lesson
from serve_app.distill.loop import student_loss

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def student_config(target: Any, hidden: int, layers: int, inner: int, max_positions: int) -> LlamaConfig:
    """A Llama configuration of the given sizes that speaks ``target``'s tokens (its configuration)."""
    width = 32 if hidden <= 256 else 64
    heads = hidden // width
    special = {k: getattr(target, k, None) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=width, tie_word_embeddings=True,
        max_position_embeddings=max_positions, rms_norm_eps=1e-5, attn_implementation="sdpa", **special,
    )  # fmt: skip


class StudentInTraining(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model: Any = LlamaForCausalLM(config)

    def forward(self, lesson: Lesson, depth: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """Mean loss of a lesson, and how many first choices agree with the teacher's, of how many.

        ``depth`` is for heads: a model reads its own drafts as it reads any text.
        """
        hidden = self.model.model(lesson.ids, use_cache=False).last_hidden_state
        loss, agree = student_loss(self.model.lm_head(hidden[lesson.answers]), lesson.logits)
        return loss / len(agree), [(int(agree.sum()), len(agree))]

    def save(self, folder: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes a Hugging Face directory with the target's tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: weight.detach().to(dtype).cpu().contiguous().clone()
            for name, weight in self.model.state_dict().items()
            if name != "lm_head.weight"
        }
        part = folder / ".model.part"
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(folder / "model.safetensors")
        config = self.model.config.to_dict()
        config.update(dtype=str(dtype).removeprefix("torch."), architectures=["LlamaForCausalLM"])
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
