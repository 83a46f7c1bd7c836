"""The GPU benchmark runs from end to end where there is none, so that it does where there is one."""

from __future__ import annotations

import json

from benchmarks.gpu import gpu, shapes


def test_the_benchmark_runs_on_a_cpu(tmp_path, capsys):
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert gpu.main(["--device", "cpu", "--shapes", "tiny", "--quick", "--json", *folders]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["parity"] == {"equal_to_cpu": True, "equal_to_generate": True, "prompts": 8}
    tiny = result["shapes"]["tiny"]
    assert "error" not in tiny["ours"] and "error" not in tiny["transformers"]
    assert tiny["ours"]["saturated"]["generated_tokens"] > 0
    assert tiny["judged"]["same_tokens_in_bfloat16"] > 0.5
    assert tiny["judged"]["prefill_share_of_matrix_rate"] > 0
    table = next(tmp_path.glob("gpu-*.md")).read_text()
    assert "one stream" in table and "failed" not in table


def test_a_roofline_counts_the_experts_that_are_chosen(tmp_path):
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(**shapes.SHAPES["qwen3-moe-8l"][1]).save_pretrained(tmp_path)
    attention, router, expert = 2048 * 128 * (2 * 32 + 2 * 4), 128 * 2048, 3 * 2048 * 768
    assert gpu.parameters_of(tmp_path) == (8 * (attention + router + 8 * expert), 8, 32, 128)
