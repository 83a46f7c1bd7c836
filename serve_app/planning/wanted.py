"""What a worker is asked for beside its weights, which decides what of these and of the cache it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_app.catalog.records import ModelRecord

# Of a record.
WANTED_FIELDS = ("lora", "quantization", "kv_cache_dtype")


@dataclass(slots=True, frozen=True)
class Wanted:
    """As a record says it. ``adapters``: whether the model serves any."""

    adapters: bool = False
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    def as_record(self) -> dict[str, Any]:
        """The fields of a record that ask for it, without those that say what records say by themselves."""
        values = dict(zip(WANTED_FIELDS, (self.adapters, self.quantization, self.kv_cache_dtype), strict=True))
        return {name: value for name, value in values.items() if value != ModelRecord.model_fields[name].default}

    def __str__(self) -> str:
        named = ["adapters"] if self.adapters else []
        named += [f"quantization {self.quantization}"] if self.quantization != "none" else []
        named += [f"a cache in {self.kv_cache_dtype}"] if self.kv_cache_dtype != "auto" else []
        return ", ".join(named)


def wanted_of(
    record: ModelRecord | None,
    *,
    adapters: bool | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
) -> Wanted:
    """What is given, and for what is None what the record says."""
    said = Wanted()
    if record is not None:
        said = Wanted(record.adapters is not None, record.quantization, record.kv_cache_dtype)
    return Wanted(
        said.adapters if adapters is None else adapters,
        quantization or said.quantization,
        kv_cache_dtype or said.kv_cache_dtype,
    )
