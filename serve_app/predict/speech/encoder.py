"""Whisper's encoder on a CPU: the numbers of transformers' module, up to the rounding of its products.

Its windows have one length, so the weights are laid out once in oneDNN's blocks, three projections are one product, and
GELU and residual sums are taken in by the product before them. Convolutions give rows for the layers, where the module
leaves every layer norm a tensor that lies across.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperForConditionalGeneration

from serve_app.kernels.linear.fused import FusedLinear
from serve_app.kernels.linear.packed import packing_available


class Encoder:
    """Takes the layers of ``model``, whose own encoder can't be called afterwards. See :meth:`takes`."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        encoder = model.model.encoder
        self._convolutions = [_Convolution(encoder.conv1), _Convolution(encoder.conv2)]
        self._positions: Tensor = encoder.embed_positions.weight
        self._layers = []
        for place, layer in enumerate(encoder.layers):
            self._layers.append(_Layer(layer))
            encoder.layers[place] = _Taken()  # what it held is free
        self._norm = encoder.layer_norm

    @staticmethod
    def takes(model: Any) -> bool:
        """Whether what is here computes ``model``'s encoder, and faster."""
        if type(model) is not WhisperForConditionalGeneration or model.device.type != "cpu":
            return False
        return model.config.activation_function == "gelu" and packing_available(model.dtype)

    def __call__(self, features: Tensor) -> Tensor:
        """``[rows, mels, frames]`` -> ``[rows, positions, width]``, in the model's dtype."""
        x = features.unsqueeze(2)
        for convolution in self._convolutions:
            x = convolution(x)
        # Rows of channels already: only the view changes.
        x = x[:, :, 0].transpose(1, 2) + self._positions
        shape = x.shape
        x = x.flatten(0, 1)
        for layer in self._layers:
            x = layer(x, shape[0])
        normed: Tensor = self._norm(x)
        return normed.view(shape)


class _Taken(nn.Module):
    """Stands in the place of a layer whose weights are here."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError("this encoder's layers have been taken; call what has them")


class _Convolution:
    """A convolution along the frames, and GELU. ``[rows, channels, 1, frames]``, of which the channels lie together."""

    def __init__(self, module: nn.Conv1d) -> None:
        weight = module.weight.detach().unsqueeze(2)
        self._weight, self._bias = weight.contiguous(memory_format=torch.channels_last), module.bias
        self._stride, self._padding = (1, module.stride[0]), (0, int(module.padding[0]))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return F.gelu(F.conv2d(x, self._weight, self._bias, self._stride, self._padding))


class _Layer:
    def __init__(self, layer: Any) -> None:
        own = layer.self_attn
        # Queries are scaled before the product, as Whisper's always were: by their weights.
        parts = [(own.q_proj, own.scaling), (own.k_proj, 1.0), (own.v_proj, 1.0)]
        biases = [
            (linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()) * scale
            for linear, scale in parts
        ]
        self._qkv = FusedLinear(
            torch.cat([linear.weight.detach() * scale for linear, scale in parts]), torch.cat(biases)
        )
        self._out, self._up, self._down = (
            FusedLinear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
            for linear in (own.out_proj, layer.fc1, layer.fc2)
        )
        self._norm, self._feed_norm = layer.self_attn_layer_norm, layer.final_layer_norm
        self._heads: int = own.num_heads

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        """``[rows * positions, width]``."""
        positions, width = len(x) // rows, x.shape[1]
        split = self._qkv(self._norm(x)).view(rows, positions, 3, self._heads, width // self._heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        x = self._out.plus(found.transpose(1, 2).reshape(len(x), width), x)
        return self._down.plus(self._up.gelu(self._feed_norm(x)), x)
