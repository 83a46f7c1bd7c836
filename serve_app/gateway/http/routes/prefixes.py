"""Where a dialect's routes begin: what its clients have as their base URL, with and without an account."""

from __future__ import annotations

from serve_app.gateway.http.exchange import ACCOUNT

OPENAI = (ACCOUNT + "/ai/v1", "/v1")
# Anthropic's clients add /v1/messages to their base URL: with the one that Cloudflare's pages give, /v1 doubles.
ANTHROPIC = ("/v1", ACCOUNT + "/ai/v1", ACCOUNT + "/ai/v1/v1", ACCOUNT + "/ai")
