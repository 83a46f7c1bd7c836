"""What a gateway replica is told at its start. Plain values: it is part of the application's configuration."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, frozen=True)
class Listed:
    """Another cluster: ``url`` is the root of its API, ``key`` one of an account that is a peer there."""

    name: str
    url: str
    key: str = field(repr=False)


@dataclass(slots=True)
class GatewaySettings:
    """``key_hashes`` are SHA-256 of API keys, in hex: the configuration never holds a key.

    ``max_inflight`` bounds the requests of one model in this gateway, and is shared among accounts; one more is refused
    with 429.
    """

    account: str
    key_hashes: tuple[str, ...]
    cluster_secret: str
    home: str
    profile: str
    models: tuple[str, ...] = ()
    max_inflight: int = 512
    # Requests per minute by task; a task without an entry is not limited.
    rate_limits: dict[str, int] = field(default_factory=dict)
    # Of all workers of a node; 0: none.
    memory_budget: int = 0
    # Pages from there may call the API from a browser.
    cors_origins: tuple[str, ...] = ()
    # /metrics asks for no key on loopback.
    metrics_open: bool = False
    max_body_bytes: int = 1 << 20
    max_embedding_body_bytes: int = 10_000_000
    max_media_body_bytes: int = 32 << 20
    # See `serve_app.config.Settings`. The URL may hold a password.
    database: str | None = field(default=None, repr=False)
    files: str | None = None
    prices: str | None = None
    ledger_days: float = 90.0
    # Answer although nothing can be written down.
    give_away: bool = False
    ledger_fsync: bool = False
    # Of accounts that have none: free or paid.
    plan: Literal["free", "paid"] = "paid"
    store_away_s: float = 3600.0
    alert_url: str | None = None
    alert_secret: str = field(default="", repr=False)
    alert_private: bool = False
    alert_shares: tuple[int, ...] = (50, 80, 100)
    webhook_private: bool = False
    # Results of batches are kept so long after the batch's end; unfinished requests that an account may have.
    batch_keep_s: float = 29 * 86_400.0
    batch_max_left: int = 2_000_000
    resume_max_s: float = 3600.0
    resume_bytes: int = 64 << 20
    # Requests of a batch, bytes of its input, and hours before what is not done expires.
    batch_max_requests: int = 50_000
    batch_file_bytes: int = 200_000_000
    batch_hours: float = 24.0
    # LoRA adapters of an account, and bytes of one's weights.
    lora_adapters: int = 100
    lora_file_bytes: int = 300_000_000
    # With several nodes, workers on other nodes must reach this gateway's token inbox.
    several_nodes: bool = False

    # Other clusters that requests may be passed to; and accounts whose keys may pass requests here.
    neighbours: tuple[Listed, ...] = ()
    peers: tuple[str, ...] = ()

    def tenant_salt(self, account: str) -> bytes:
        """Keeps tenants' cached prefixes apart; nobody outside the cluster can compute it."""
        return hmac.new(self.cluster_secret.encode(), account.encode(), hashlib.sha256).digest()
