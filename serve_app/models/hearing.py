"""Sounds to the embeddings that stand in a prompt: the part of a model that hears, transformers' own.

The rest of a model that is listed here is a plain decoder: features take the places of placeholder tokens, positions
count on through them, and attention stays causal. Families that do otherwise are not listed, and their sounds are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from serve_app.models.media import Encoded, kept_apart

# By `model_type`: places of the encoder that become one feature, of those that were heard; 0: windows are heard to
# their end, silence and all.
MERGED = {"voxtral": 0, "qwen2_audio": 2, "audioflamingo3": 2, "glmasr": 4}
# Half a minute each, that are heard at once: of a long sound, some after the others.
WINDOWS = 8


@dataclass(slots=True)
class SoundEncoder:
    """See :class:`~serve_app.models.media.MediaEncoder`. ``merged``: of :data:`MERGED`."""

    module: Any
    options: dict[str, Any]
    merged: int
    whole: bool = False
    grids: bool = False
    beside: bool = False

    @property
    def place_bytes(self) -> int:
        return int(self.module.config.get_text_config().hidden_size * self.module.dtype.itemsize)

    @torch.inference_mode()
    def __call__(self, sounds: Sequence[dict[str, Tensor]]) -> list[Encoded]:
        """Of each sound, as `serve_app.predict.sounds` prepares it and all of as many windows, what it becomes."""
        dtype, device = self.module.dtype, self.module.device
        windows = torch.cat([sound["windows"] for sound in sounds]).to(device, dtype)
        heard = torch.cat([sound["heard"] for sound in sounds]).to(device)
        parts = zip(windows.split(WINDOWS), heard.split(WINDOWS), strict=True)
        features = torch.cat([self._features(*part) for part in parts]).to(dtype)
        if not self.merged:
            return [Encoded(kept_apart(own)) for own in features.chunk(len(sounds))]
        counts = [int(self._counts(sound["heard"]).sum()) for sound in sounds]
        return [Encoded(kept_apart(own)) for own in features.split(counts)]

    def _features(self, windows: Tensor, heard: Tensor) -> Tensor:
        """[features of all windows, hidden]; of each window [mels, frames], so many frames are ``heard``."""
        model, masks = self.module.model, (torch.arange(windows.shape[-1], device=heard.device) < heard[:, None]).long()
        if self.module.config.model_type == "qwen2_audio":
            return self._pooled(windows, heard)
        given = (windows, masks) if self.merged else (windows,)
        found: Tensor = model.get_audio_features(*given, return_dict=True).pooler_output
        return found

    def _pooled(self, windows: Tensor, heard: Tensor) -> Tensor:
        """As `Qwen2AudioModel.forward` has it, which has no function for that."""
        tower, projector = self.module.model.audio_tower, self.module.model.multi_modal_projector
        places = torch.arange(tower.max_source_positions, device=heard.device)
        embeds = windows.new_zeros(len(windows), len(places), 1)
        seen = (places < ((heard - 1) // 2 + 1)[:, None]).long()
        mask = create_bidirectional_mask(config=tower.config, inputs_embeds=embeds, attention_mask=seen)
        found: Tensor = projector(tower(windows, attention_mask=mask, return_dict=True).last_hidden_state)
        return found[torch.arange(found.shape[1], device=heard.device) < self._counts(heard)[:, None]]

    def _counts(self, heard: Tensor) -> Tensor:
        return (((heard - 1) // 2 + 1 - self.merged) // self.merged + 1).clamp(min=0)


def sound_encoder(module: nn.Module) -> SoundEncoder | None:
    """The encoder of a loaded model; None if it takes no sounds, or in a way that is not known here."""
    owner: Any = module
    config = owner.config
    if config.model_type not in MERGED:
        return None
    tower = owner.get_encoder(modality="audio")
    # The paged attention is the decoder's; sounds have no cache.
    tower.set_attn_implementation("sdpa")
    hears, merged = config.audio_config, MERGED[config.model_type]
    places = getattr(hears, "max_source_positions", None) or hears.max_position_embeddings
    return SoundEncoder(module, {"frames": 2 * places, "apart": bool(merged)}, merged)
