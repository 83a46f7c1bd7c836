"""Adapters with random numbers, for measuring speed: as PEFT writes them, in bfloat16, on all linears but the head."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapters(model_dir: Path, folder: Path, count: int, rank: int) -> list[Path]:
    """``count`` folders; each holds numbers of its own, as large as those of the base, so that answers differ."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir, local_files_only=True))
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name != "lm_head"
    }
    found = []
    for number in range(count):
        target = folder / f"adapter-{number:04}"
        target.mkdir(parents=True)
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (n, k) in shapes.items():
            for part, size in (("lora_A", (rank, k)), ("lora_B", (n, rank))):
                values = torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.2 * rank**-0.25, generator=generator)
                tensors[f"base_model.model.{name}.{part}.weight"] = values
        save_file(tensors, target / "adapter_model.safetensors", {"format": "pt"})
        told = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model_dir.name, "r": rank,
            "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
            "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        }  # fmt: skip
        (target / "adapter_config.json").write_text(json.dumps(told))
        found.append(target)
    return found


def write_many(model_dir: Path, files: Path, count: int, rank: int) -> None:
    """``count`` adapters in a file store, as gateways keep them, and ``known.json`` with digest and size of each. They
    differ in one matrix: what is loaded, packed and multiplied is as much as of adapters that differ in all.
    """
    from safetensors.torch import load, save

    from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, blob, content_digest
    from serve_app.state.blobs.files import open_files

    [folder] = write_adapters(model_dir, files / "one", 1, rank)
    config = (folder / CONFIG).read_bytes()
    tensors = load((folder / WEIGHTS).read_bytes())
    name = min(tensors)
    first, store, known = tensors[name], open_files(str(files)), []
    for number in range(count):
        tensors[name] = first * (1 + number / count)
        weights = save(tensors)
        digest = content_digest(config, len(weights))
        digest.update(weights)
        for file, data in ((CONFIG, config), (WEIGHTS, weights)):
            store.put(blob(digest.hexdigest(), file), data)
        known.append((digest.hexdigest(), len(config) + len(weights)))
    (files / "known.json").write_text(json.dumps(known))
