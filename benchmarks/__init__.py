"""Measurements, by subject. ``python -m benchmarks`` lists them; ``benchmarks/results/`` keeps what they found."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "checkpoints"
RESULTS = Path(__file__).resolve().parent / "results"
