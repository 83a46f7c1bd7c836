"""Memory in the chaos run: one process each, whatever has been killed meanwhile."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.chaos.run import Chaos
from benchmarks.chaos.target import Target


@pytest.mark.parametrize(
    ("samples", "grew"),
    [
        ([470] * 20, False),
        # It was not there for some of the samples.
        ([470, 470, 470, 0, 470, 0, 470, 0, 470, 407, 0, 470, 470, 470, 470, 0, 470, 0, 470, 470], False),
        ([200] * 10 + [900] * 10, True),
        ([200 + 50 * n for n in range(20)], True),
    ],
)
async def test_a_process_that_grows_breaks_the_run(samples: list[int], grew: bool) -> None:
    run = Chaos(Target("http://127.0.0.1:1", "key", Path("/"), 0), argparse.Namespace(seed=1))
    run.minutes, run.memory = 30.0, [{"ray::EngineWorker": mib, "shared memory": mib} for mib in samples]
    run.check_memory()
    assert [found["what"].split(" grew")[0] for found in run.weather.broke] == ["memory of ray::EngineWorker"] * grew
    await run.clients.http.aclose()
