"""The table of expectations: one list for each API."""

from __future__ import annotations

from benchmarks.conformance import anthropic, cloudflare, ollama, openai, responses, servers
from benchmarks.conformance.case import Case, Models

APIS = (openai.cases, responses.cases, anthropic.cases, servers.cases, ollama.cases, cloudflare.cases)


def cases(models: Models) -> list[Case]:
    return [case for api in APIS for case in api(models)]
