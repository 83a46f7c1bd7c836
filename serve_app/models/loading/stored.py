"""What a model may keep as its checkpoint has it. Workers ask here when they load a model, and plans when they count
its bytes, so that both say the same.
"""

from __future__ import annotations


def keeps_codes(*, adapters: bool, quantization: str) -> bool:
    """Whether experts in few bits may stay codes: what adapters are for, and what is rounded, are numbers."""
    return not adapters and quantization == "none"


def keeps_latents(*, adapters: bool, quantization: str) -> bool:
    """Whether the cache may hold latents, where the model has some and the device attends to them. Their expansion
    becomes part of queries and outputs, where adapters and codes of it have no place.
    """
    return not adapters and quantization == "none"
