"""What a worker on a GPU holds of weights that it rounds when it loads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from serve_app.planning.formats import Format
from serve_app.planning.held import GROUP, is_linear
from serve_app.planning.tensors import Tensor

# Linears of the fused layers, which alone compute in float8. The head is not among them: its errors choose tokens.
_FLOAT8 = ("attention", "mlp")
# Of an output's scale in float32.
_SCALE = 4
# Codes that nothing packs take a byte each, those of 4 bits as well. A group has a scale, and in 4 bits an offset.
_CODES = {"int8": 1 + 2 / GROUP, "int4": 1 + 4 / GROUP}


class NotRounded(ValueError):
    """The model's weights can't be rounded like this on GPUs; the text says why."""


def as_rounded(tensors: Iterable[Tensor], quantization: str, stored_as: Format | None, *, fused: bool) -> list[Tensor]:
    """``tensors`` with the bytes that they take once rounded, and those that they take beside these until then.
    ``fused``: whether the fused layers may run them, which let go of what they do not need. Raises :class:`NotRounded`.
    """
    found = list(tensors)
    experts = any(tensor.role == "experts" for tensor in found)
    if stored_as is not None and (stored_as.group is None or (stored_as.dense and not experts)):
        raise NotRounded(f"the weights are in {stored_as.name} already; leave quantization {quantization} out")
    if quantization == "fp8":
        if experts:
            raise NotRounded("the experts do not compute in float8; leave quantization fp8 out")
        if not fused:
            raise NotRounded("layers with latents or states do not compute in float8; leave quantization fp8 out")
    elif not any(tensor.role == "head" for tensor in found):
        # One that is tied to the embedding gets a weight of its own.
        found += [replace(each, name="lm_head.weight") for each in found if each.role == "embedding"]
    return [_rounded(tensor, quantization, fused=fused and not experts) for tensor in found]


def _rounded(tensor: Tensor, quantization: str, *, fused: bool) -> Tensor:
    plain = max(tensor.bytes, tensor.values * 2)  # what is packed is unpacked first
    if not is_linear(tensor) or tensor.role == "routers":
        return replace(tensor, bytes=plain)
    if quantization == "fp8":
        if tensor.role not in _FLOAT8:
            return replace(tensor, bytes=plain)
        return replace(tensor, bytes=tensor.values + tensor.shape[0] * _SCALE, passing=plain)
    codes = int(tensor.values * _CODES[quantization]) if tensor.shape[-1] % GROUP == 0 else 0
    # GPUs multiply the rounded numbers in 16 bits. The fused layers drop the codes, transformers' forward keeps them.
    return replace(tensor, bytes=plain, passing=codes) if fused else replace(tensor, bytes=plain + codes)
