"""Whisper's decoder, greedy and with timestamps: the tokens of transformers' `generate` without what surrounds them.

For a short sound most of `generate`'s time goes into checking options, building caches and calling modules. Here are
the decoder's layers alone, over a cache of K/V that is allocated once, and the rules of
`WhisperTimeStampLogitsProcessor` (Radford et al. 2022, section 4.5; transformers' `generation/logits_process.py`).
What this does not do (beams, prompts, times of words, settings beyond `KNOWN`) is `generate`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperForConditionalGeneration

from serve_app.kernels.linear.packed import pack_linears

# Of narrower layers a packed product takes longer to call than to do.
PACKED_WIDTH = 256
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
    """Has the linears of ``model`` laid out anew where that is faster; `generate` takes them as they are then."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        config, said = model.config, model.generation_config
        if config.d_model >= PACKED_WIDTH:
            pack_linears(model)
        self._decoder = model.model.decoder
        self._head = model.proj_out
        self._layers = [_Layer(layer) for layer in self._decoder.layers]
        self._heads: int = config.decoder_attention_heads
        self._size: int = config.d_model // self._heads
        self._longest: int = config.max_target_positions
        # Of the model's device and dtype.
        self._like: Tensor = self._decoder.embed_positions.weight
        self._most: int = said.max_length
        self._eos: int = said.eos_token_id
        self._times: int = said.no_timestamps_token_id + 1
        self._latest_start: int | None = getattr(said, "max_initial_timestamp_index", None)
        device, size = model.device, config.vocab_size
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
        """``prefix``: as long for all rows. ``heard`` is used up: rows move in it as others end."""
        rows, given = len(prefix), len(prefix[0])
        longest = min(self._most + min(self._longest // 2 - 1, given), self._longest)
        buffers = self._buffers(rows, longest)
        first, logits = self._pass(buffers, heard, torch.tensor(prefix), 0)
        tokens: list[list[int]] = [[] for _ in range(rows)]
        sums, counts = [0.0] * rows, [0] * rows
        # The rows that are computed, and which of them go on.
        live, at = list(range(rows)), given
        going = set(live)
        while True:
            best, sure = self._choose(logits, [tokens[row] for row in live])
            for row, token, logprob in zip(live, best, sure, strict=True):
                if row in going:
                    sums[row] += logprob
                    counts[row] += 1
                    # One that is over may compute on beside the others; its tokens are nobody's.
                    if token == self._eos:
                        going.remove(row)
                    else:
                        tokens[row].append(token)
            at += 1
            if not going or at >= longest:
                break
            if 2 * len(going) <= len(live):
                kept = [place for place, row in enumerate(live) if row in going]
                buffers, heard = _rows(buffers, kept), _rows(heard, kept)
                live, best = [live[place] for place in kept], [best[place] for place in kept]
            _, logits = self._pass(buffers, heard, torch.tensor(best)[:, None], at - 1)
        return Said(tokens, [total / count for total, count in zip(sums, counts, strict=True)], first)

    def _buffers(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer."""
        shape = (rows, self._heads, length, self._size)
        return [(self._like.new_empty(shape), self._like.new_empty(shape)) for _ in self._layers]

    def _pass(
        self, buffers: list[tuple[Tensor, Tensor]], heard: Crossed, ids: Tensor, at: int
    ) -> tuple[Tensor, Tensor]:
        """Logits behind the first and the last of ``ids``, which stand at ``at``."""
        decoder, rows, length = self._decoder, *ids.shape
        ids = ids.to(self._like.device)
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
            self._rules(scores, tokens)
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

    def _rules(self, scores: Tensor, tokens: list[list[int]]) -> None:
        """Timestamps come in pairs, but for one before the end, and never go back."""
        count = scores.shape[1] - self._times
        # From which timestamp on each row may go on, and whether it must.
        least, must = [], []
        for said in tokens:
            timed = said[-1] >= self._times
            paired = len(said) < 2 or said[-2] >= self._times
            last = next((token - self._times for token in reversed(said) if token >= self._times), -1)
            least.append(count if timed and paired else last if timed else last + 1)
            must.append(timed and not paired)
        if any(least):
            places = torch.arange(count, device=scores.device)
            scores[:, self._times :].masked_fill_(places < places.new_tensor(least)[:, None], NEVER)
        if any(must):
            scores[:, : self._eos].masked_fill_(torch.tensor(must, device=scores.device)[:, None], NEVER)


class _Layer:
    """One layer's modules. Projections of one input are one product; the modules' own weights become its parts, so
    that nothing lies in memory twice.
    """

    def __init__(self, layer: Any) -> None:
        own, cross = layer.self_attn, layer.encoder_attn
        self.norm, self.cross_norm = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm
        self.qkv = _joined(own.q_proj, own.k_proj, own.v_proj)
        self._kv = _joined(cross.k_proj, cross.v_proj)
        self._out, self.cross_q, self._cross_out = own.out_proj, cross.q_proj, cross.out_proj
        self._scale: float = own.scaling
        self._feed_norm, self._up, self._down = layer.final_layer_norm, layer.fc1, layer.fc2
        self._activation = layer.activation_fn

    def crossed(self, encoded: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """K and V of what was heard, each ``[rows, heads, positions, size]``."""
        rows, positions, width = encoded.shape
        both = self._kv(encoded).view(rows, positions, 2, heads, width // heads)
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


def _rows(pairs: Crossed, kept: list[int]) -> Crossed:
    """The ``kept`` rows, put where the first ones lay: nothing more is held meanwhile than a part of one layer."""
    at, count = torch.tensor(kept, device=pairs[0][0].device), len(kept)
    for pair in pairs:
        for tensor in pair:
            tensor[:count] = tensor[at]
    return [(keys[:count], values[:count]) for keys, values in pairs]


def _joined(*linears: Any) -> Callable[[Tensor], Tensor]:
    """All of them on one input, one behind the other. Weights become views of one, but of those that are packed."""
    if not all(isinstance(linear, nn.Linear) for linear in linears):
        return lambda x: torch.cat([linear(x) for linear in linears], -1)
    weight = torch.cat([linear.weight.data for linear in linears])
    size = len(linears[0].weight)
    bias = weight.new_zeros(len(weight))
    for at, linear in enumerate(linears):
        part = slice(at * size, (at + 1) * size)
        linear.weight.data = weight[part]
        if linear.bias is not None:
            bias[part] = linear.bias.data
            linear.bias.data = bias[part]
    return lambda x: F.linear(x, weight, bias)
