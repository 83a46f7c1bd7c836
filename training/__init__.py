"""Trains the models that come with the project; see README.md."""

from pathlib import Path

STATE = Path(__file__).parent / ".state"
