"""Tables of batches. What has ended is one row of `batches`; its shards and results are gone."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, LargeBinary, String, Table

from serve_app.state.store.tables import metadata

# `caller`, `about`, `problems`: JSON. `owner`: who checks its input or writes its files, up to `until`; "" for nobody.
# `open`: shards that are not finished. `money`: 1e-9 of `currency`. `expires`: when it is forgotten, None before its
# end. Times: unix seconds.
batches = Table(
    "batches",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("door", String, nullable=False),
    Column("caller", String, nullable=False),
    Column("created", Double, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("keep_s", Double, nullable=False),
    Column("status", String, nullable=False),
    Column("about", LargeBinary, nullable=False),
    Column("problems", LargeBinary, nullable=False),
    Column("input", String, nullable=False),
    Column("output", String, nullable=False),
    Column("errors", String, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("succeeded", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("cancelled", BigInteger, nullable=False),
    Column("expired", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("neurons", BigInteger, nullable=False),
    Column("money", BigInteger, nullable=False),
    Column("currency", String, nullable=False),
    Column("started", Double),
    Column("finalizing", Double),
    Column("cancelling", Double),
    Column("ended", Double),
    Column("owner", String, nullable=False),
    Column("until", Double, nullable=False),
    Column("open", BigInteger, nullable=False),
    Column("expires", Double),
    Index("batches_by_age", "account", "created", "id"),
    Index("batches_by_status", "status", "deadline"),
    Index("batches_by_end", "expires", "account"),
)

# `owner`: the runner that works on it up to `until`, for the `epoch`-th time; "" for nobody, None once it is finished.
# `done`: requests that have results. `account` and `deadline` are those of the batch.
batch_shards = Table(
    "batch_shards",
    metadata,
    Column("batch", String, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("account", String, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("model", String, nullable=False),
    Column("blob", String, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("owner", String),
    Column("epoch", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
    Index("batch_shards_in_turn", "owner", "account", "deadline", "batch", "number"),
)

# `used`: JSON.
batch_results = Table(
    "batch_results",
    metadata,
    Column("batch", String, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String),
    Column("outcome", String, nullable=False),
    Column("status", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("request_id", String, nullable=False),
    Column("used", String, nullable=False),
)
