"""Cloudflare's GraphQL Analytics API, as far as it tells of Workers AI."""
