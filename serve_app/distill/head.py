"""An EAGLE-3 head in training (arXiv 2503.01840, section 3: training-time test).

Each slot is unrolled as in drafting: first from the target's states, then from the head's own output, with the true
tokens. Unrolled by s, slot i stands at position i + s and sees the target-made keys up to i and its own later ones::

                 keys made from the target's states | keys of this slot's own chain
    unrolled 0   0 .. i                             |
    unrolled 1   0 .. i                             | 1
    unrolled 2   0 .. i                             | 1, 2
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from serve_app.distill.answers import Lesson
from serve_app.distill.loop import student_loss
from serve_app.models.decoders.fused_decoder import rotate

# How much less each further draft counts: it is only reached if those before stand.
DECAY = 0.8


@dataclass(slots=True, frozen=True)
class HeadShape:
    """``layers``: what enters these layers of the target is read. ``rotary``: the target's rotary settings."""

    vocab: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    layers: tuple[int, ...]
    rotary: dict[str, Any]
    max_positions: int


class _Layer(nn.Module):
    """Parameters under the names in which heads are published; :class:`HeadInTraining` computes."""

    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        q, kv = s.q_heads * s.head_dim, s.kv_heads * s.head_dim
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(s.hidden, eps=s.eps) for _ in range(3)
        )
        self.self_attn = nn.ModuleDict(
            {"q_proj": _linear(2 * s.hidden, q), "k_proj": _linear(2 * s.hidden, kv),
             "v_proj": _linear(2 * s.hidden, kv), "o_proj": _linear(q, s.hidden)}
        )  # fmt: skip
        self.mlp = nn.ModuleDict(
            {"gate_proj": _linear(s.hidden, s.inner), "up_proj": _linear(s.hidden, s.inner),
             "down_proj": _linear(s.inner, s.hidden)}
        )  # fmt: skip


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class HeadInTraining(nn.Module):
    """``embedding`` [vocab, hidden] is the target's and stays as it is; ``draft_ids`` [n] are the target's token ids
    that can be drafted, ascending; ``output`` [n, hidden] is where the output layer starts from, and stays if ``tied``.
    """

    def __init__(
        self, shape: HeadShape, embedding: Tensor, draft_ids: Tensor, output: Tensor, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(len(shape.layers) * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.lm_head = _linear(shape.hidden, len(draft_ids))
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, 0, 0.02 if not name.endswith(("o_proj.weight", "down_proj.weight")) else 0.002)
        with torch.no_grad():
            # Begin as the target's last captured state read by the target's own output layer.
            self.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
            self.lm_head.weight.copy_(output)
        self.lm_head.weight.requires_grad_(not tied)
        self.tied = tied
        self.draft_ids: Tensor
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, lesson: Lesson, depth: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """Mean loss of a lesson, and for each unrolling how many drafts agree with the teacher, of how many."""
        assert lesson.states is not None
        ids, answers = lesson.ids, lesson.answers
        batch, length = ids.shape
        # Row r of ``where`` is the teacher's row for position [b, i], -1 where there is none.
        where = torch.full((batch, length), -1, device=ids.device)
        where[answers] = torch.arange(len(lesson.logits), device=ids.device)
        wanted = lesson.logits[:, self.draft_ids].float()
        # Where the teacher's choice can't be drafted there is nothing to learn.
        draftable = wanted.amax(-1) >= lesson.logits.amax(-1).float()
        hidden = self.fc(lesson.states.float().flatten(2))
        cos, sin = rotary(self.shape, length + depth, ids.device)
        keys: list[tuple[Tensor, Tensor]] = []
        total = hidden.new_zeros(())
        weights, agreed = 0.0, []
        for step in range(depth):
            # Slot i reads token i + 1 + step and is to say what the teacher said there.
            tokens, rows = (
                F.pad(t[:, 1 + step :], (0, 1 + step), value=v)[:, :length] for t, v in ((ids, 0), (where, -1))
            )
            hidden = self._layer(hidden, tokens, cos[step : step + length], sin[step : step + length], keys)
            counts = rows >= 0
            counts[counts.clone()] = draftable[rows[counts]]
            if not counts.any():
                break
            logits = self.lm_head(self.norm(hidden[counts]))
            loss, agree = student_loss(logits, wanted[rows[counts]])
            total = total + DECAY**step * loss / len(agree)
            weights += DECAY**step
            # A choice that can't be drafted is a draft that fails.
            agreed.append((int(agree.sum()), int((rows >= 0).sum())))
        return total / max(weights, 1.0), agreed

    def _layer(self, hidden: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, keys: list) -> Tensor:
        layer: Any = self.layers[0]
        shape = self.shape
        batch, length = tokens.shape
        embedded = F.embedding(tokens, self.embedding)  # type: ignore[arg-type]
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        q, k, v = (layer.self_attn[f"{n}_proj"](x).view(batch, length, -1, shape.head_dim) for n in "qkv")
        q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
        group = shape.q_heads // shape.kv_heads
        keys.append((k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        attended = _attend(q * shape.head_dim**-0.5, keys).flatten(2)
        hidden = hidden + layer.self_attn["o_proj"](attended)
        y = layer.post_attention_layernorm(hidden)
        return hidden + layer.mlp["down_proj"](F.silu(layer.mlp["gate_proj"](y)) * layer.mlp["up_proj"](y))

    def save(self, folder: Path, target: str, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the head as SafeAILab and SpecForge do, which SGLang and vLLM read."""
        shape, ids = self.shape, self.draft_ids
        tensors = {
            name.replace("layers.0.", "midlayer."): weight.detach().to(dtype).cpu().contiguous()
            for name, weight in self.state_dict().items()
        }
        if self.tied:
            del tensors["lm_head.weight"]
        tensors["d2t"] = ids.cpu() - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, ids.cpu(), True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": 1,
            "num_attention_heads": shape.q_heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "rms_norm_eps": shape.eps, "max_position_embeddings": shape.max_positions, "vocab_size": shape.vocab,
            "draft_vocab_size": len(ids), "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
            "torch_dtype": str(dtype).removeprefix("torch."), **shape.rotary,
            # vLLM and this project count the layer that a state enters, SGLang the one that it leaves.
            "eagle_aux_hidden_state_layer_ids": list(shape.layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in shape.layers], "use_aux_hidden_state": True,
            },
            "target_model": target,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / ".model.part"
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.shape), "draft_vocab": self.lm_head.out_features}


def _attend(q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, L, heads, D]: the first keys causally, of the others each slot its own."""
    length = q.shape[1]
    first_k, first_v = keys[0]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, first_k)
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    own = [torch.einsum("bqhd,bqhd->bhq", q, k)[..., None] for k, _ in keys[1:]]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], first_v)
    for index, (_, v) in enumerate(keys[1:]):
        out = out + weights[..., length + index].transpose(1, 2)[..., None] * v
    return out


def rotary(shape: HeadShape, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] as the head will have them when it is served."""
    from serve_app.models.decoders.decoder_parts import rotary_tables
    from serve_app.models.heads.eagle import rotary_module

    module = rotary_module(shape.hidden, shape.q_heads, shape.head_dim, shape.rotary)
    with torch.no_grad():
        cos, sin = rotary_tables(module, torch.empty(1, shape.hidden))(positions)
    return cos.clone().to(device), sin.clone().to(device)


def most_frequent(samples_ids: list[list[int]], vocab: int, count: int | None) -> Tensor:
    """The token ids worth drafting, ascending: ``count`` of them, or as many as make up 99.9 % of the answers."""
    seen = torch.zeros(vocab, dtype=torch.int64)
    for ids in samples_ids:
        seen += torch.bincount(torch.tensor(ids), minlength=vocab)
    order = seen.argsort(descending=True, stable=True)
    if count is None:
        share = seen[order].cumsum(0) / max(1, int(seen.sum()))
        count = min(32000, -(-int((share < 0.999).sum() + 1) // 64) * 64)
    return order[: min(count, vocab)].sort().values
