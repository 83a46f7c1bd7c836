"""What clusters tell each other: prefixes, frames, keys, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from serve_app.api.errors import ApiError
from serve_app.catalog.load import load_catalog
from serve_app.config import ConfigError, load_settings
from serve_app.gateway.neighbours import prefixes, receiving
from serve_app.gateway.neighbours.prefixes import Prefixes, cached_tokens, chunk_keys, passed_salt, split, tenant_tag
from serve_app.gateway.neighbours.receiving import Receiving, _check
from serve_app.gateway.settings import Listed
from serve_app.routing.locality import LocalityIndex
from serve_app.sampling_params import SamplingParams, TokenLogprobs
from serve_app.setting_values import neighbour_keys
from serve_app.tasks.model import ServedModel
from serve_app.wire.message import BadMessage
from serve_app.wire.neighbours import ALIVE, MAX_FRAME, Frames, PassCall, PassedTokens, PassFailed, frame

CHAT = "@cf/pico/pico-instruct"


def keys(account: str, tag: bytes, tokens: int = 1024) -> list[bytes]:
    return chunk_keys(b"weights", passed_salt(account, tag), np.arange(tokens, dtype=np.int32), 256)


def test_both_clusters_know_the_keys_of_what_was_passed_and_nobody_elses() -> None:
    ann, bob = tenant_tag(b"ann's secret", "paris"), tenant_tag(b"bob's secret", "paris")
    assert len(keys("berlin", ann)) == 4 and keys("berlin", ann) == keys("berlin", ann)
    # Another tenant, another cluster that asks, and the same tenant in another cluster: nothing is common.
    others = (keys("berlin", bob), keys("rome", ann), keys("berlin", tenant_tag(b"ann's secret", "rome")))
    assert all(not set(keys("berlin", ann)) & set(other) for other in others)
    index, kept = LocalityIndex(1000), Prefixes()
    for account, tag in (("berlin", ann), ("rome", bob)):
        kept.add(account, CHAT, keys(account, tag))
        index.add(keys(account, tag)[:3], "a worker")
    told = split(kept.told("berlin", CHAT, index.held))
    assert told == {key[:4] for key in keys("berlin", ann)[:3]}
    assert cached_tokens(told, keys("berlin", ann), 256) == 768
    assert cached_tokens(told, keys("rome", bob), 256) == 0 and kept.told("nobody", CHAT, index.held) == b""
    # What a cache lets go is told no more, and what is behind a gap is worth nothing.
    index.discard(keys("berlin", ann)[:1], "a worker")
    told = split(kept.told("berlin", CHAT, index.held))
    assert len(told) == 2 and cached_tokens(told, keys("berlin", ann), 256) == 0


def test_gateways_that_ask_are_counted_for_each_cluster_while_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_ASKERS", 3)
    here = Receiving(None)  # type: ignore[arg-type]
    assert [here._count("berlin", name, 0.0) for name in ("a", "b", "a")] == [1, 2, 2]
    assert here._count("rome", "a", 1.0) == 1
    assert here._count("berlin", "b", 9.0) == 2 and here._count("berlin", "b", 12.0) == 1
    assert [here._count("berlin", name, 13.0) for name in "cdef"] == [2, 3, 3, 3]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_KEYS", 8)
    monkeypatch.setattr(prefixes, "MAX_PAIRS", 3)
    kept = Prefixes()

    def everything(found: object) -> np.ndarray:
        return np.ones(len(found), np.bool_)  # type: ignore[arg-type]

    for number in range(5):
        for prompt in range(4):
            kept.add(f"account {number}", CHAT, keys("a", bytes([number, prompt])))
    assert kept.told("account 0", CHAT, everything) == b""
    told = split(kept.told("account 4", CHAT, everything))
    # The two last prompts.
    assert told == {key[:4] for prompt in (2, 3) for key in keys("a", bytes([4, prompt]))}


messages = st.lists(
    st.builds(PassedTokens, st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple), st.none() | st.just("stop"))
    | st.builds(PassFailed, st.text(max_size=40)),
    max_size=8,
)


@given(messages, st.lists(st.integers(1, 60), min_size=1))
def test_frames_are_read_however_they_are_cut(sent, sizes) -> None:
    data = b"".join(ALIVE + frame(one) for one in sent)
    read, found, at = Frames(), [], 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        found += read.feed(data[at : at + size])
        at += size
    assert found == sent


def test_numbers_of_tokens_survive_and_noise_is_refused() -> None:
    one = PassedTokens((5, 6), None, (TokenLogprobs(-0.5, [(5, -0.5)]), TokenLogprobs(-1.0, [])), 32)
    assert Frames().feed(frame(one)) == [one]
    for noise in ((MAX_FRAME + 1).to_bytes(4, "big"), b"\0\0\0\1\xc1"):
        with pytest.raises(BadMessage):
            Frames().feed(noise)


CALL = PassCall(CHAT, np.arange(8, dtype="<i4").tobytes(), SamplingParams(max_tokens=4), bytes(32), "a tokenizer")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": b""}, "ids"),
        ({"ids": b"123"}, "ids"),
        ({"ids": np.array([-1], "<i4").tobytes()}, "between 0"),
        ({"ids": np.array([1 << 30], "<i4").tobytes()}, "between 0"),
        ({"ids": bytes(4 << 20)}, "too long"),
        ({"sampling": SamplingParams(logit_bias={1 << 30: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(stop_token_ids=(-1,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(logprobs=21)}, "More is asked for"),
        ({"sampling": SamplingParams(prompt_logprobs=0)}, "More is asked for"),
        ({"sampling": SamplingParams(grammar="x" * (1 << 19))}, "grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_client_could_ask_for_no_cluster_can(change, says) -> None:
    catalog = load_catalog()
    model = ServedModel(catalog[CHAT], catalog[CHAT].serving["local"], catalog.source(CHAT), Path("/nonexistent"))
    _check(model, CALL)
    with pytest.raises(ApiError, match=says):
        _check(model, changed(CALL, **change))


def test_neighbours_are_listed_by_name_and_their_keys_are_nowhere_else(tmp_path: Path) -> None:
    def load(**environ: str):
        return load_settings({"SERVE_APP_HOME": str(tmp_path), **environ})

    assert load().neighbours == () and load().peers == ()
    found = load(SERVE_APP_NEIGHBOURS="paris=https://paris.example.com/, rome=http://10.0.0.2:8000/api")
    assert "neighbours in the clear: rome." in "".join(found.warnings)
    assert not load(SERVE_APP_NEIGHBOURS="here=http://127.0.0.1:8000").warnings
    assert load(SERVE_APP_PEERS="berlin, rome").peers == ("berlin", "rome")
    with pytest.raises(ValueError, match="neighbour paris has no key. Set SERVE_APP_NEIGHBOUR_KEY_PARIS"):
        neighbour_keys(found.neighbours, tmp_path, {})
    (tmp_path / "neighbours").mkdir()
    file = tmp_path / "neighbours" / "rome.key"
    file.write_text("rome's-key\n")
    file.chmod(0o644)
    told = {"SERVE_APP_NEIGHBOUR_KEY_PARIS": "paris's-key"}
    with pytest.raises(ValueError, match="chmod 600"):
        neighbour_keys(found.neighbours, tmp_path, told)
    file.chmod(0o600)
    listed = [Listed(*one) for one in neighbour_keys(found.neighbours, tmp_path, told)]
    assert [(one.name, one.url, one.key) for one in listed] == [
        ("paris", "https://paris.example.com", "paris's-key"),
        ("rome", "http://10.0.0.2:8000/api", "rome's-key"),
    ]
    assert "key='" not in repr(listed) and "paris's-key" not in repr(found)
    for wrong, says in (
        ("https://paris.example.com", "no neighbour"),
        ("paris=https://key@paris.example.com", "without a key"),
        ("Paris=https://paris.example.com", "small letters"),
        ("a=http://x,a=http://y", "one name"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(SERVE_APP_NEIGHBOURS=wrong)


def test_a_neighbour_without_a_key_stops_the_start_with_a_remedy(tmp_path: Path) -> None:
    from serve_app.app import gateway_application

    settings = load_settings(
        {"SERVE_APP_HOME": str(tmp_path), "SERVE_APP_NEIGHBOURS": "paris=https://paris.example.com"}
    )
    with pytest.raises(ConfigError, match="neighbour paris has no key"):
        gateway_application(settings)
