"""Whisper's decoder, greedy and with timestamps: the tokens of transformers' `generate` without what surrounds them.

For a short sound most of `generate`'s time goes into checking options, building caches and calling modules. Here are
the decoder's layers alone, over a cache of K/V that is allocated once, and the rules of
`WhisperTimeStampLogitsProcessor` (Radford et al. 2022, section 4.5; transformers' `generation/logits_process.py`).
What this does not do (beams, prompts, times of words, settings beyond `KNOWN`) is `generate`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import WhisperForConditionalGeneration

# What a generation config may say. Whatever else it sets changes `generate` in ways that are not known here.
KNOWN = frozenset(
    {
        "_from_model_config", "alignment_heads", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id",
        "eos_token_id", "is_multilingual", "lang_to_id", "max_initial_timestamp_index", "max_length",
        "median_filter_width", "no_timestamps_token_id", "pad_token_id", "prev_sot_token_id", "return_timestamps",
        "suppress_tokens", "task_to_id", "transformers_version",
    }
)  # fmt: skip
NEVER = float("-inf")
# K and V of what was heard, of each layer.
Crossed = list[tuple[Tensor, Tensor]]


@dataclass(slots=True, frozen=True)
class Said:
    """Of each row: its tokens without prefix and end, and the mean log-probability of its choices, the end's included.
    ``first``: float32 logits behind the first token of the prefix, ``[rows, vocabulary]``.
    """

    tokens: list[list[int]]
    logprobs: list[float]
    first: Tensor


class Greedy:
    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        config, said = model.config, model.generation_config
        self._decoder = model.model.decoder
        self._head = model.proj_out
        self._layers = [_Layer(layer) for layer in self._decoder.layers]
        self._heads: int = config.decoder_attention_heads
        self._size: int = config.d_model // self._heads
        self._longest: int = config.max_target_positions
        self._most: int = said.max_length
        self._eos: int = said.eos_token_id
        self._times: int = said.no_timestamps_token_id + 1
        self._latest_start: int | None = getattr(said, "max_initial_timestamp_index", None)
        device, size = self._head.weight.device, config.vocab_size
        never = [*(said.suppress_tokens or ()), said.no_timestamps_token_id]
        self._never = torch.zeros(size, device=device).index_fill_(0, torch.tensor(never, device=device), NEVER)
        at_first = torch.tensor([*(said.begin_suppress_tokens or ())], dtype=torch.long, device=device)
        self._never_at_first = self._never.clone().index_fill_(0, at_first, NEVER)

    @staticmethod
    def takes(model: Any) -> bool:
        """Whether the tokens are those of the model's own `generate`."""
        if type(model) is not WhisperForConditionalGeneration:
            return False
        said = model.generation_config
        known = {name for name, value in said.to_diff_dict().items() if value is not None} <= KNOWN
        return known and isinstance(said.eos_token_id, int) and isinstance(said.max_length, int)

    def heard(self, encoded: Tensor) -> Crossed:
        """What layers look at of ``encoded``, the encoder's ``[rows, positions, width]``."""
        return [layer.crossed(encoded, self._heads) for layer in self._layers]

    def first(self, heard: Crossed, start: int) -> Tensor:
        """Logits behind ``start`` alone."""
        rows = len(heard[0][0])
        return self._pass(self._buffers(rows, 1), heard, torch.full((rows, 1), start), 0)[0]

    def run(self, heard: Crossed, prefix: list[list[int]]) -> Said:
        """``prefix``: as long for all rows."""
        rows, given = len(prefix), len(prefix[0])
        longest = min(self._most + min(self._longest // 2 - 1, given), self._longest)
        buffers = self._buffers(rows, longest)
        first, logits = self._pass(buffers, heard, torch.tensor(prefix), 0)
        tokens: list[list[int]] = [[] for _ in range(rows)]
        sums, counts, over = [0.0] * rows, [0] * rows, [False] * rows
        at = given
        while True:
            best, sure = self._choose(logits, tokens)
            for row in range(rows):
                if not over[row]:
                    sums[row] += sure[row]
                    counts[row] += 1
                    over[row] = best[row] == self._eos
                    # One that is over computes on beside the others; its tokens are nobody's.
                    if not over[row]:
                        tokens[row].append(best[row])
            at += 1
            if all(over) or at >= longest:
                break
            _, logits = self._pass(buffers, heard, torch.tensor(best)[:, None], at - 1)
        return Said(tokens, [total / count for total, count in zip(sums, counts, strict=True)], first)

    def _buffers(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer."""
        weight = self._head.weight
        return [
            (
                weight.new_empty((rows, self._heads, length, self._size)),
                weight.new_empty((rows, self._heads, length, self._size)),
            )
            for _ in self._layers
        ]

    def _pass(
        self, buffers: list[tuple[Tensor, Tensor]], heard: Crossed, ids: Tensor, at: int
    ) -> tuple[Tensor, Tensor]:
        """Logits behind the first and the last of ``ids``, which stand at ``at``."""
        decoder, rows, length = self._decoder, *ids.shape
        ids = ids.to(self._head.weight.device)
        x = decoder.embed_tokens(ids) + decoder.embed_positions.weight[at : at + length]
        for layer, (keys, values), across in zip(self._layers, buffers, heard, strict=True):
            q, k, v = layer.qkv(layer.norm(x)).view(rows, length, 3, self._heads, self._size).permute(2, 0, 3, 1, 4)
            keys[:, :, at : at + length] = k
            values[:, :, at : at + length] = v
            x = x + layer.attend(q, keys[:, :, : at + length], values[:, :, : at + length], causal=length > 1)
            q = layer.cross_q(layer.cross_norm(x)).view(rows, length, self._heads, self._size).transpose(1, 2)
            x = x + layer.cross_attend(q, *across)
            x = x + layer.feed(x)
        x = decoder.layer_norm(x)
        last = self._head(x[:, -1]).float()
        return self._head(x[:, 0]).float() if length > 1 else last, last

    def _choose(self, logits: Tensor, tokens: list[list[int]]) -> tuple[list[int], list[float]]:
        """Each row's token and its log-probability among what the rules let pass."""
        first = not tokens[0]
        scores = logits + (self._never_at_first if first else self._never)
        if first:
            scores[:, : self._times] = NEVER
            if self._latest_start is not None:
                scores[:, self._times + self._latest_start + 1 :] = NEVER
        else:
            for row, said in enumerate(tokens):
                self._rules(scores[row], said)
        # Timestamps that are together likelier than every other token are chosen from.
        timed = scores[:, self._times :].logsumexp(-1)
        best, place = scores[:, : self._times].max(-1)
        best_time, place_time = scores[:, self._times :].max(-1)
        to_time = timed > best
        alone = torch.where(to_time, timed, scores.logsumexp(-1))
        # Of equal scores the first is taken, as argmax over all of them does.
        take = to_time | (best_time > best)
        chosen = torch.where(take, place_time + self._times, place)
        return chosen.tolist(), (torch.where(take, best_time, best) - alone).tolist()

    def _rules(self, scores: Tensor, said: list[int]) -> None:
        """Timestamps come in pairs, but for one before the end, and never go back."""
        timed = said[-1] >= self._times
        paired = len(said) < 2 or said[-2] >= self._times
        if timed:
            if paired:
                scores[self._times :] = NEVER
            else:
                scores[: self._eos] = NEVER
        last = next((token for token in reversed(said) if token >= self._times), None)
        if last is not None:
            scores[self._times : last if timed and not paired else last + 1] = NEVER


class _Layer:
    """One layer's modules. Projections of one input are one product; the modules' own weights become its parts, so
    that nothing lies in memory twice.
    """

    def __init__(self, layer: Any) -> None:
        own, cross = layer.self_attn, layer.encoder_attn
        self.norm, self.cross_norm = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm
        self._qkv = _joined(own.q_proj, own.k_proj, own.v_proj)
        self._kv = _joined(cross.k_proj, cross.v_proj)
        self._out, self.cross_q, self._cross_out = own.out_proj, cross.q_proj, cross.out_proj
        self._scale: float = own.scaling
        self._feed_norm, self._up, self._down = layer.final_layer_norm, layer.fc1, layer.fc2
        self._activation = layer.activation_fn

    def qkv(self, x: Tensor) -> Tensor:
        return F.linear(x, *self._qkv)

    def crossed(self, encoded: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """K and V of what was heard, each ``[rows, heads, positions, size]``."""
        rows, positions, width = encoded.shape
        both = F.linear(encoded, *self._kv).view(rows, positions, 2, heads, width // heads)
        k, v = both.permute(2, 0, 3, 1, 4).contiguous()
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return self._attention(self._out, q, k, v, causal)

    def cross_attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention(self._cross_out, q, k, v, False)

    def _attention(self, out: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        # Queries are scaled before the product, as Whisper's always were.
        q = q * self._scale
        if q.shape[2] == 1 and q.device.type == "cpu":
            # torch's fused attention is made for many queries: for one it takes several times as long.
            found = (q @ k.transpose(2, 3)).float().softmax(-1).to(v.dtype) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)
        projected: Tensor = out(found.transpose(1, 2).flatten(2))
        return projected

    def feed(self, x: Tensor) -> Tensor:
        fed: Tensor = self._down(self._activation(self._up(self._feed_norm(x))))
        return fed


def _joined(*linears: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of them all, which become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    size = len(linears[0].weight)
    bias = weight.new_zeros(len(weight))
    for at, linear in enumerate(linears):
        part = slice(at * size, (at + 1) * size)
        linear.weight.data = weight[part]
        if linear.bias is not None:
            bias[part] = linear.bias.data
            linear.bias.data = bias[part]
    return weight, bias
