"""The GPU benchmark runs from end to end where there is none, so that it does where there is one."""

from __future__ import annotations

import json

from benchmarks.gpu import gpu


def test_the_benchmark_runs_on_a_cpu(tmp_path, capsys):
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert gpu.main(["--device", "cpu", "--shapes", "tiny", "--json", *folders]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["parity"] == {"equal_to_cpu": True, "equal_to_generate": True, "prompts": 8}
    tiny = result["shapes"]["tiny"]
    assert "error" not in tiny["ours"] and "error" not in tiny["transformers"]
    assert tiny["ours"]["saturated"]["generated_tokens"] > 0
    assert tiny["judged"]["same_tokens_in_bfloat16"] > 0.5
    assert tiny["judged"]["prefill_share_of_matrix_rate"] > 0
    table = next(tmp_path.glob("gpu-*.md")).read_text()
    assert "one stream" in table and "failed" not in table
