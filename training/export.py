"""Write a model as a Hugging Face directory: bfloat16 safetensors, float32 in the config, files renamed
into place.

Readers (a server, another helper's test) may open the directory while training goes on; every file is
complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel


def export(model: PreTrainedModel, directory: Path, step: int, generation: dict | None = None) -> None:
    """Save weights (bfloat16), config.json (`dtype` float32: served exactly) and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ())
        if getattr(model.config, "tie_word_embeddings", False)
        else set()
    )
    state = {
        k: (v.detach().to(torch.bfloat16) if v.is_floating_point() else v).contiguous().clone()
        for k, v in model.state_dict().items()
        if k not in tied and not k.endswith("position_ids")
    }  # fmt: skip
    config = model.config.to_dict()
    config.pop("torch_dtype", None)
    config.update(dtype="float32", architectures=[type(model).__name__])
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as part:
        temp = Path(part)
        save_file(state, temp / "model.safetensors", metadata={"format": "pt", "step": str(step)})
        (temp / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if generation is not None:
            (temp / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        for file in sorted(temp.iterdir()):
            os.chmod(file, 0o644)
            os.replace(file, directory / file.name)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files of one checkpoint to another, each renamed into place."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        part = target / f".{name}.part"
        shutil.copyfile(source / name, part)
        os.replace(part, target / name)
