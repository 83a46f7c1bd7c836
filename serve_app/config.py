"""Settings: defaults, then $SERVE_APP_HOME/config.yaml, then environment variables; and the secrets kept
beside them.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from serve_app.catalog.records import Bytes
from serve_app.catalog.tasks import declared
from serve_app.ray_private.environment import PORTS
from serve_app.setting_values import comma_list, in_the_clear, neighbour_list, numbers

DEFAULT_HOME = "~/.serve_app"
MIN_KEY_LENGTH = 16
# Environment variable -> setting. Of two names for one setting the earlier wins.
ENVIRONMENT = {
    "SERVE_APP_HOST": "host",
    "SERVE_APP_PORT": "port",
    "PORT": "port",
    "SERVE_APP_PROFILE": "profile",
    "SERVE_APP_API_KEY": "api_key",
    "SERVE_APP_ACCOUNT_ID": "account_id",
    "SERVE_APP_MODELS": "models",
    "SERVE_APP_MAX_BODY_BYTES": "max_body_bytes",
    "SERVE_APP_MAX_EMBEDDING_BODY_BYTES": "max_embedding_body_bytes",
    "SERVE_APP_MAX_MEDIA_BODY_BYTES": "max_media_body_bytes",
    "SERVE_APP_MEMORY_BUDGET": "memory_budget",
    "SERVE_APP_MAX_INFLIGHT": "max_inflight",
    "SERVE_APP_RATE_LIMITS": "rate_limits",
    "SERVE_APP_CORS_ORIGINS": "cors_origins",
    "SERVE_APP_METRICS_OPEN": "metrics_open",
    "SERVE_APP_DATABASE": "database",
    "SERVE_APP_FILES": "files",
    "SERVE_APP_OBJECT_STORE_BYTES": "object_store_bytes",
    "SERVE_APP_KV_DISK_BYTES": "kv_disk_bytes",
    "SERVE_APP_LORA_CACHE_BYTES": "lora_cache_bytes",
    "SERVE_APP_KV_DISK_DIR": "kv_disk_dir",
    "SERVE_APP_KV_GUARANTEED": "kv_guaranteed",
    "SERVE_APP_PRICES": "prices",
    "SERVE_APP_LEDGER_DAYS": "ledger_days",
    "SERVE_APP_LEDGER_FULL": "ledger_full",
    "SERVE_APP_LEDGER_FSYNC": "ledger_fsync",
    "SERVE_APP_PLAN": "plan",
    "SERVE_APP_STORE_AWAY_S": "store_away_s",
    "SERVE_APP_ALERT_URL": "alert_url",
    "SERVE_APP_ALERT_SECRET": "alert_secret",
    "SERVE_APP_ALERT_PRIVATE": "alert_private",
    "SERVE_APP_ALERT_SHARES": "alert_shares",
    "SERVE_APP_WEBHOOK_PRIVATE": "webhook_private",
    "SERVE_APP_BATCH_KEEP_DAYS": "batch_keep_days",
    "SERVE_APP_BATCH_MAX_LEFT": "batch_max_left",
    "SERVE_APP_BATCH_RUNNERS": "batch_runners",
    "SERVE_APP_GATEWAYS": "gateways",
    "SERVE_APP_RESUME_MAX_S": "resume_max_s",
    "SERVE_APP_RESUME_BYTES": "resume_bytes",
    "SERVE_APP_BATCH_MAX_REQUESTS": "batch_max_requests",
    "SERVE_APP_BATCH_FILE_BYTES": "batch_file_bytes",
    "SERVE_APP_BATCH_HOURS": "batch_hours",
    "SERVE_APP_LORA_ADAPTERS": "lora_adapters",
    "SERVE_APP_LORA_FILE_BYTES": "lora_file_bytes",
    "SERVE_APP_NEIGHBOURS": "neighbours",
    "SERVE_APP_PEERS": "peers",
    "SERVE_APP_REQUEST_TIMEOUT_S": "request_timeout_s",
    "SERVE_APP_LOG": "log",
    "SERVE_APP_LOG_CONTENT": "log_content",
    **{variable: setting for setting, variable in PORTS.items()},
}


class ConfigError(Exception):
    """A setting cannot be used. The text names where it came from, the reason and a remedy; never a secret's
    value.
    """


def cloudflare_rate_limits() -> dict[str, int]:
    """Requests per minute and account that Workers AI allows, by task."""
    return {task.name: task.rate_limit for task in declared().values() if task.rate_limit is not None}


def _rate_limits(value: Any) -> Any:
    """`cloudflare`, `TASK=300,OTHER=2000`, or a mapping."""
    if not isinstance(value, str):
        return value
    if value.strip() == "cloudflare":
        return cloudflare_rate_limits()
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    return {task.strip(): limit.strip() for task, _, limit in pairs}


PortNumber = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseModel):
    """Everything an operator can set. Sizes accept "256MiB"; environment values are text and are
    converted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    home: Path
    host: str = "127.0.0.1"
    port: PortNumber = 8000
    profile: Literal["local", "gpu"] = "local"
    api_key: str | None = Field(default=None, repr=False)  # None: the one kept in home/api_key
    account_id: str = Field(default="local", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    models: Annotated[tuple[str, ...], BeforeValidator(comma_list)] = ()  # empty: all the profile has
    max_body_bytes: Bytes = 1 << 20  # text generation
    max_embedding_body_bytes: Bytes = 10_000_000  # tasks that take many texts, batches
    max_media_body_bytes: Bytes = 32 << 20  # tasks that take pictures or sound
    object_store_bytes: Bytes = 1 << 30  # Ray's object store on this node: the shared KV cache lives there
    # Of all models' workers on one machine, which take turns within it; None: nobody counts.
    memory_budget: Bytes | None = None
    lora_cache_bytes: Bytes = 1 << 30  # adapters in the memory of each worker of a model that takes them
    kv_disk_bytes: Bytes = 1 << 30  # files behind it, per node; 0: none
    kv_disk_dir: Path | None = None  # None: home/kv
    # The part of both that is shared out equally among the active tenants, so that nobody can flush another.
    kv_guaranteed: float = Field(default=0.5, ge=0, le=1)
    max_inflight: int = Field(default=512, ge=1)  # requests of one model in one gateway; more get 429
    # Requests per minute and account, by task; a task that is not named is not limited, and by default none is: a
    # machine of one's own is limited by what it can do, which answers 429 by itself.
    rate_limits: Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(_rate_limits)] = {}
    # Origins, such as https://chat.example.com, whose pages may call the API from a browser; * for all.
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(comma_list)] = ()
    metrics_open: bool = False  # /metrics asks for no key of processes of this machine that ask by loopback
    # What gateways share (accounts, limits, stored responses, traces): postgresql+psycopg://USER:PASSWORD@HOST/NAME.
    # None: a file in home, for the gateways of one node.
    database: str | None = Field(default=None, repr=False)
    files: str | None = None  # a directory or s3://BUCKET/PREFIX; None: home/files
    prices: Path | None = None  # the operator's price list; None: home/prices.yaml where it is
    ledger_days: float = Field(default=90, gt=0, allow_inf_nan=False)  # entries are kept so long, their sums for ever
    # What happens to requests while nothing can be written down of them.
    ledger_full: Literal["refuse", "serve"] = "refuse"
    # Whether an answer waits until its entry would outlive a loss of power.
    ledger_fsync: bool = False
    # Of accounts that have none of their own: free (10,000 neurons a day, no models that are marked paid) or paid.
    plan: Literal["free", "paid"] = "paid"
    # For so long requests go on while the database is away, with the keys, limits and leases that are known.
    store_away_s: float = Field(default=3600, ge=0, allow_inf_nan=False)
    # At these shares of a budget, in per cent, the log says so, and with a URL a signed webhook.
    alert_shares: Annotated[tuple[Annotated[int, Field(ge=1, le=100)], ...], BeforeValidator(numbers)] = (50, 80, 100)
    alert_url: str | None = Field(default=None, pattern=r"^https?://[^/@\s]+(/\S*)?$")
    alert_secret: str | None = Field(default=None, repr=False)  # None: the one kept in home/alert_secret
    alert_private: bool = False  # whether the URL may lead into a private network
    webhook_private: bool = False  # the same of URLs that accounts subscribe
    # Batches: for how long results are kept, requests that an account may have unfinished, and processes that run them
    # at most (None: 1 on a machine of one's own, 16 on a cluster).
    batch_keep_days: float = Field(default=29, gt=0, allow_inf_nan=False)
    batch_max_left: int = Field(default=2_000_000, ge=1)
    batch_runners: int | None = Field(default=None, ge=1)
    gateways: int = Field(default=1, ge=1, le=64)  # at least; a cluster has more while there is much to do
    # Other clusters that requests may be passed to, NAME=URL, and accounts of those that may pass requests here.
    neighbours: Annotated[tuple[str, ...], BeforeValidator(neighbour_list)] = ()
    peers: Annotated[tuple[str, ...], BeforeValidator(comma_list)] = ()
    # Streams that go on without a client: for how long at most, and bytes kept of each account's.
    resume_max_s: float = Field(default=3600, gt=0, allow_inf_nan=False)
    resume_bytes: Bytes = 64 << 20
    # Requests of a batch, bytes of a file of them, and hours before what is not done expires.
    batch_max_requests: int = Field(default=50_000, ge=1, le=1_000_000)
    batch_file_bytes: Bytes = 200_000_000
    lora_adapters: int = Field(default=100, ge=1, le=100_000)  # adapters of an account
    lora_file_bytes: Bytes = 300_000_000  # of one's weights
    batch_hours: float = Field(default=24, gt=0, le=8760, allow_inf_nan=False)
    request_timeout_s: float = Field(default=1800, gt=0, allow_inf_nan=False)
    log: Literal["text", "json"] = "text"
    log_content: bool = False  # whether messages of exceptions, which may quote prompts, are in JSON logs
    haproxy_metrics_port: PortNumber = 9101
    haproxy_stats_port: PortNumber = 8404
    fallback_port: PortNumber = 8500  # Serve's own proxy, HAProxy's backup

    @field_validator("api_key")
    @classmethod
    def _key_is_long_enough(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if len(value) < MIN_KEY_LENGTH or any(not 33 <= ord(letter) <= 126 for letter in value):
            raise ValueError(
                f"an API key is at least {MIN_KEY_LENGTH} printable ASCII characters without spaces"
                " | Make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return value

    @field_validator("alert_secret")
    @classmethod
    def _secret_signs(cls, value: str | None) -> str | None:
        try:
            known = value is None or 24 <= len(base64.b64decode(value.removeprefix("whsec_"), validate=True)) <= 64
        except ValueError:
            known = False
        if not known:
            raise ValueError(
                "the secret of webhooks is whsec_ and the base64 of 24 to 64 bytes"
                " | Leave it out: one is made and kept in the state directory."
            )
        return value

    @field_validator("database")
    @classmethod
    def _database_is_known(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("postgresql+psycopg://", "postgresql://", "sqlite:///")):
            raise ValueError(
                "the URL of the database cannot be used | Use postgresql+psycopg://USER:PASSWORD@HOST/NAME, or leave "
                "it out for a file in the state directory."
            )
        return value

    @field_validator("files")
    @classmethod
    def _files_are_somewhere(cls, value: str | None) -> str | None:
        if value is not None and "://" in value and not value.startswith("s3://"):
            raise ValueError("files lie in a directory or in S3 | Use a path or s3://BUCKET/PREFIX.")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:\d+)?", origin):
                raise ValueError(
                    f"{origin!r} is no origin | Use * or scheme and host, such as https://chat.example.com."
                )
        return value

    @field_validator("rate_limits")
    @classmethod
    def _tasks_exist(cls, value: dict[str, int]) -> dict[str, int]:
        if unknown := sorted(set(value) - set(declared())):
            raise ValueError(f"{unknown[0]!r} is no task | Tasks: {', '.join(declared())}.")
        return value

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost") or self.host.startswith("127.")

    @property
    def warnings(self) -> list[str]:
        """What an operator should know before the server listens."""
        found = []
        if not self.is_loopback:
            found.append(
                f"Listening on {self.host} without TLS: keys and prompts travel in the clear. Put a "
                f"TLS proxy in front and let a firewall close all but port {self.port} (30000-31000, "
                f"{self.haproxy_stats_port} and {self.haproxy_metrics_port} answer without a key)."
            )
        if plain := in_the_clear(self.neighbours):
            found.append(f"Keys and prompts go to neighbours in the clear: {', '.join(plain)}. Use https.")
        if self.several_nodes and self.database is None:
            found.append(
                "Several nodes without a database: accounts, rate limits, stored responses and traces stay on the node "
                "whose gateway has them. Set SERVE_APP_DATABASE=postgresql+psycopg://USER:PASSWORD@HOST/NAME."
            )
        return found

    @property
    def several_nodes(self) -> bool:
        return self.profile != "local"

    def ray_environment(self) -> dict[str, str]:
        """The settings that Ray Serve takes from the environment; the rest is in ray_private/environment.py."""
        return {variable: str(getattr(self, setting)) for setting, variable in PORTS.items()}


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from defaults < config.yaml < environment < `overrides` (None is ignored). Raises
    ConfigError.
    """
    environ = os.environ if environ is None else environ
    home = Path(overrides.pop("home", None) or environ.get("SERVE_APP_HOME") or DEFAULT_HOME).expanduser().resolve()
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    file = home / "config.yaml"
    if file.exists():
        for key, value in _read_yaml(file).items():
            values[key], origin[key] = value, f"{file}: {key}"
    for name in reversed(ENVIRONMENT):
        if environ.get(name):
            values[ENVIRONMENT[name]], origin[ENVIRONMENT[name]] = (
                environ[name],
                f"environment variable {name}",
            )
    for key, value in overrides.items():
        if value is not None:
            values[key], origin[key] = value, f"option {key}"
    if "home" in values:
        raise ConfigError(f"{file}: home cannot be set in its own file. Set SERVE_APP_HOME instead.")
    try:
        return Settings(home=home, **values)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def api_key(settings: Settings) -> str:
    """The key clients must send: the one that was set, else the one generated at first start and kept in
    home.
    """
    if settings.api_key is not None:
        return settings.api_key
    key = _kept_secret(settings.home / "api_key")
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{settings.home / 'api_key'} holds no usable key. Delete it: the next start makes a new one."
        )
    return key


def alert_secret(settings: Settings) -> str:
    """What webhooks are signed with: the one that was set, else one that is kept in home."""
    if settings.alert_secret is not None:
        return settings.alert_secret
    return _kept_secret(
        settings.home / "alert_secret", lambda: f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
    )


def cluster_secret(settings: Settings) -> bytes:
    """32 bytes, the same on every start: tenants' cache salts are derived from it."""
    text = _kept_secret(settings.home / "cluster_secret", lambda: secrets.token_hex(32))
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise ConfigError(
            f"{settings.home / 'cluster_secret'} is damaged. Delete it: the next start makes a new one "
            "(and starts with an empty cache)."
        )
    return secret


def _kept_secret(path: Path, make: Any = lambda: secrets.token_urlsafe(32)) -> str:
    """The secret in `path`, made at first use. Readable by the owner only; two first starts agree on one
    value.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(make() + "\n")
            try:
                os.link(draft, path)  # fails if another process was first; then its value counts
            except FileExistsError:
                pass
            finally:
                os.unlink(draft)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read or made ({error.strerror}). Set SERVE_APP_HOME to a directory you own."
        ) from error


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: not readable as YAML. Correct it or remove the file.") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{file}: settings are `name: value` lines. Known: {_known()}.")
    return data


def _known() -> str:
    return ", ".join(sorted(set(Settings.model_fields) - {"home"}))


def _explain(error: ValidationError, origin: dict[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    where = origin.get(key, key)
    if first["type"] == "extra_forbidden":
        return f"{where}: no such setting. Known: {_known()}."
    if first["type"] == "value_error":
        reason, _, remedy = str(first["ctx"]["error"]).partition(" | ")
        return f"{where}: {reason}. {remedy or 'Correct it or leave it out for the default.'}"
    given = "the value" if key in ("api_key", "database", "alert_secret", "alert_url") else repr(first["input"])
    default = Settings.model_fields[key].default
    message = first["msg"][:1].lower() + first["msg"][1:]
    remedy = f"Correct it or leave it out for the default ({default!r})."
    return f"{where}: {given} cannot be used ({message}). {remedy}"
