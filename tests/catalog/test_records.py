"""What a record may say, and how a wrong one is refused: file, field, reason, remedy."""

from pathlib import Path

import pytest

from serve_app.catalog import CatalogError, load_catalog
from serve_app.catalog.load import load_record, weights_directory
from serve_app.catalog.records import Weights

GOOD = """
id: "@cf/me/mine"
task: text-generation
description: A model of mine.
created_at: 2026-01-02
weights: {repo: me/mine, revision: main}
serving:
  local:
    decode: {kv_cache_bytes: 256MiB, max_replicas: 2}
"""

REPO = "{repo: me/mine, revision: main}"


def wheel(name: str = "mine", version: str = "1") -> str:
    return f'{{wheel: {{name: "{name}", version: "{version}", sha256: "{"0" * 64}", folder: model}}}}'


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def test_a_short_record_gets_the_defaults(tmp_path: Path) -> None:
    record = load_record(write(tmp_path, GOOD))
    assert (record.defaults.max_tokens, record.defaults.temperature) == (256, 0.6)
    stages = record.serving["local"].stages
    assert list(stages) == ["decode"] and stages["decode"].kv_cache_bytes == 256 * 2**20
    assert (record.author, record.name, record.created_at) == ("me", "mine", "2026-01-02")


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (("description:", "descriptoin:"), "description", "required"),
        (("max_replicas: 2", "max_replicsa: 2"), "serving.local.decode.max_replicsa", "max_replicas"),
        (("max_replicas: 2", 'max_replicas: "2"'), "serving.local.decode.max_replicas", "integer"),
        (("max_replicas: 2", "max_replicas: 0"), "serving.local.decode.max_replicas", "at least 1"),
        (("max_replicas: 2", "min_replicas: 3"), "serving.local.decode", "Raise max_replicas"),
        (("256MiB", "256 elephants"), "serving.local.decode.kv_cache_bytes", "256MiB or 4GiB"),
        (("  local:", "  lokal:"), "serving.lokal", "'gpu'"),
        (("    decode:", "    embeddings:"), "", "does not belong to task text-generation"),
        (("    decode:", "    prefill:"), "", "has no decode stage"),
        (("    decode:", "    draft: {}\n    decode:"), "", "no draft model"),
        (("serving:", "draft: {method: eagle2, weights: {path: x}}\nserving:"), "draft.method", "'eagle3'"),
        (
            ("serving:\n  local:", "draft: {method: eagle3, weights: {path: x}}\nserving:\n  local:\n    draft: {}"),
            "",
            "drafts in the decode worker",
        ),
        (
            ("serving:\n  local:", "draft: {colocated: true, weights: {path: x}}\nserving:\n  local:\n    draft: {}"),
            "",
            "Remove serving.local.draft",
        ),
        (("serving:", "draft: {weights: {path: x}, lora: {a: b}}\nlora: true\nserving:"), "", "not in lora.public"),
        (
            ("serving:", "draft: {method: eagle3, weights: {path: x}, lora: {a: b}}\nlora: {public: {a: b}}\nserving:"),
            "",
            "Remove draft.lora",
        ),
        (("text-generation", "text-to-video"), "task", "'text-embeddings'"),
        (("@cf/me/mine", "mine"), "id", "@cf/author/name"),
        (('"@cf/me/mine"', "7"), "id", "not text"),
        (('"@cf/me/mine"', "@cf/me/mine"), "line 2", "@"),
        (("repo: me/mine", "repo: me/mine, path: here"), "weights", "exactly one of"),
        (("{repo: me/mine, revision: main}", "{}"), "weights", "none of them"),
        (
            ("{repo: me/mine, revision: main}", "{path: here, revision: main}"),
            "weights",
            "revision goes with repo",
        ),
        (("serving:", "dtype: float64\nserving:"), "dtype", "'bfloat16'"),
        (("serving:", "quantization: int3\nserving:"), "quantization", "'int8'"),
        (("serving:", "price: {input: .nan}\nserving:"), "price.input", "is no price"),
        (("serving:", "price: {input: -1}\nserving:"), "price.input", "at least 0"),
        (("serving:", "defaults: {temperature: hot}\nserving:"), "defaults.temperature", "number"),
        (("serving:", "task: reranking\nserving:"), "line", "given twice"),
        (("description: A model of mine.", "description: [unclosed"), "line", "expected"),
        # What YAML's own reader stumbles over.
        (("2026-01-02", "2026-02-30"), "", "Write it in quotes"),
        (("A model of mine.", "!!int ''"), "", "Write it in quotes"),
        (("A model of mine.", "1" * 5000), "", "Write it in quotes"),
        # What would become another line of pip's, or a URL.
        ((REPO, wheel(name="x @ https://a.test/x.tar.gz #")), "weights.wheel.name", "does not fit"),
        ((REPO, wheel(name="../../x")), "weights.wheel.name", "does not fit"),
        ((REPO, wheel(version="1\\n--index-url https://a.test")), "weights.wheel.version", "does not fit"),
    ],
)
def test_a_wrong_record_is_refused_by_file_field_and_reason(
    tmp_path: Path, change: tuple[str, str], field: str, words: str
) -> None:
    assert change[0] in GOOD
    path = write(tmp_path, GOOD.replace(*change, 1))
    with pytest.raises(CatalogError) as refused:
        load_record(path)
    assert refused.value.source == str(path)
    assert refused.value.field.startswith(field)
    assert words in str(refused.value)
    assert refused.value.remedy and "pydantic" not in str(refused.value)


@pytest.mark.parametrize("path", ["~nobody-is-called-that/x", "x" * 300])
def test_a_directory_that_cannot_be_looked_at_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(CatalogError, match=r"weights\.path"):
        weights_directory(Weights(path=path), tmp_path / "mine.yaml")


@pytest.mark.parametrize("content", [b"", b"- a\n- b\n", b"\xff\xfe\x00", b"id: \x01"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(CatalogError) as refused:
        load_record(path)
    assert str(path) in str(refused.value)


def test_the_same_id_twice_is_refused_and_both_files_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "models", GOOD, "a.yaml")
    second = write(tmp_path / "models", GOOD, "b.yaml")
    with pytest.raises(CatalogError) as refused:
        load_catalog(tmp_path)
    assert refused.value.source == str(second) and str(first) in str(refused.value)


def test_a_user_record_replaces_a_built_in_one(tmp_path: Path) -> None:
    before = load_catalog(tmp_path)
    path = write(tmp_path / "models", GOOD.replace("@cf/me/mine", "@cf/pico/pico-instruct"))
    after = load_catalog(tmp_path)
    assert len(after) == len(before)
    assert after["@cf/pico/pico-instruct"].description == "A model of mine."
    assert after.source("@cf/pico/pico-instruct") == path


def test_a_path_is_looked_for_beside_the_record_first(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("{repo: me/mine, revision: main}", "{path: weights/here}"))
    weights = load_record(path).weights
    with pytest.raises(CatalogError, match="weights.path: there is no directory"):
        weights_directory(weights, path)
    (tmp_path / "weights" / "here").mkdir(parents=True)
    assert weights_directory(weights, path) == (tmp_path / "weights" / "here").resolve()


def test_only_asks_for_known_models_of_the_profile(tmp_path: Path) -> None:
    write(tmp_path / "models", GOOD)
    catalog = load_catalog(tmp_path)
    assert [record.id for record, _ in catalog.started("local", ["@cf/me/mine"])] == ["@cf/me/mine"]
    with pytest.raises(CatalogError, match="Did you mean @cf/me/mine"):
        catalog.started("local", ["@cf/you/mine"])
    with pytest.raises(CatalogError, match="has no gpu profile"):
        catalog.started("gpu", ["@cf/me/mine"])
    with pytest.raises(CatalogError, match=r"draft\.weights\.path|weights\.path"):
        write(tmp_path / "models", GOOD.replace("repo: me/mine, revision: main", "path: nowhere"))
        load_catalog(tmp_path).started("local", ["@cf/me/mine"])


def test_gpu_records_are_shaped_for_roles_that_move() -> None:
    """A worker of either stage can take the other's work: what the simulated machine of `benchmarks trace` has."""
    from benchmarks.trace.spec import RECORD_KV_TOKENS, RECORD_SEQS, ClusterSpec

    found = 0
    for record in load_catalog(None):
        stages = profile.stages if (profile := record.serving.get("gpu")) else {}
        if not {"prefill", "decode"} <= set(stages):
            continue
        sizes = [stages[stage] for stage in ("prefill", "decode")]
        assert len({(s.max_batch_tokens, s.max_num_seqs, s.kv_cache_bytes, s.num_gpus) for s in sizes}) == 1, record.id
        found += 1
    assert found >= 10
    eight = load_catalog(None)["@cf/meta/llama-3.1-8b-instruct"].serving["gpu"].stages["decode"]
    assert (eight.max_num_seqs, eight.max_batch_tokens) == (RECORD_SEQS, ClusterSpec().chunk)
    assert eight.kv_cache_bytes == RECORD_KV_TOKENS * ClusterSpec().kv_token_bytes
