"""Torch's compiler is not imported by what computes, and is itself as soon as somebody wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.variants import some

COMPUTES = """
import serve_app, importlib.util, inspect, sys, torch
import transformers.masking_utils as masks, transformers.models.llama.modeling_llama
wanted = masks.TransformGetItemToIndex
torch.arange(3, device="meta") + 1
inspect.getmodule(torch.ones(1))
assert importlib.util.find_spec("torch._dynamo")
assert not {"torch._inductor", "torch._dynamo.config"} & set(sys.modules)
"""
A_MASK = """
import torch
order = lambda b, h, q, k: torch.tensor([0, 2, 1, 3])[q] >= k
found = masks.sdpa_mask(1, 4, 4, mask_function=order, use_vmap=True, allow_is_causal_skip=False)
assert found[0, 0].tolist() == [[k <= q for k in range(4)] for q in (0, 2, 1, 3)], found
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as real, trace_wrapped
assert real is not wanted and callable(trace_wrapped)
"""
MODULES = """
assert importlib.util.find_spec("torch._dynamo.no_such") is None
import torch._dynamo.config as config, torch._dynamo
assert torch._dynamo.config is config is sys.modules["torch._dynamo.config"] and torch._dynamo.__file__
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.optimize
"""
COMPILED = """
assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item() == 2
"""


@pytest.mark.parametrize("then", some([A_MASK, MODULES, COMPILED], A_MASK), ids=["mask", "modules", "compiled"])
def test_in_a_fresh_process(then):
    done = subprocess.run([sys.executable, "-c", COMPUTES + then], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
