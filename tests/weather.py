"""The tool that tests give models, as OpenAI's clients write it."""

from __future__ import annotations

from typing import Any

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather of a city", "parameters": CITY},
}
