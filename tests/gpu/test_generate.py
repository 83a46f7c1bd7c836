"""The same truth on a GPU: greedy tokens equal transformers' ``generate`` on the same device, in float32."""

from __future__ import annotations

import random

import pytest
import torch

from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 24


@pytest.mark.parametrize("family", list(tiny.FAMILIES | tiny.OTHERS | tiny.MIXTURES | tiny.LATENT))
def test_mixed_batch_with_chunked_prefill(family, tmp_path):
    path = tiny.write_checkpoint(tmp_path / family, family)
    model = tiny.load(path, device="cuda")
    reference = tiny.load_reference(path).to("cuda")
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 256) for _ in range(rng.randrange(1, 150))] for _ in range(16)]
    engine = tiny.make_engine(model, num_blocks=200, max_batch_tokens=64)
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS))
    outputs = tiny.run_all(engine)
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)] == tiny.reference_tokens(reference, prompt, NEW_TOKENS)
