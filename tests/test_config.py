"""Settings: where they come from, how a wrong one is refused, and how the secrets are kept."""

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.config import ConfigError, alert_secret, api_key, cluster_secret, load_settings
from serve_app.ray_private import environment as env


def test_defaults(tmp_path: Path) -> None:
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path)})
    assert (settings.host, settings.port, settings.profile, settings.account_id) == (
        "127.0.0.1",
        8000,
        "local",
        "local",
    )
    assert settings.models == () and settings.warnings == []


def test_file_then_environment_then_option(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("port: 8100\nprofile: gpu\nmodels: [a, b]\nobject_store_bytes: 2GiB\n")
    home = {"SERVE_APP_HOME": str(tmp_path)}
    assert load_settings(home).port == 8100 and load_settings(home).object_store_bytes == 2 * 2**30
    assert load_settings(home | {"PORT": "8200"}).port == 8200
    assert load_settings(home | {"PORT": "8200", "SERVE_APP_PORT": "8300"}).port == 8300
    assert load_settings(home | {"PORT": "8200"}, port=8400, profile=None).port == 8400
    assert load_settings(home | {"SERVE_APP_MODELS": " x , y,"}).models == ("x", "y")
    assert load_settings(home).profile == "gpu"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PORT", "eight", "environment variable PORT: 'eight'"),
        ("SERVE_APP_PORT", "70000", "65535"),
        ("SERVE_APP_PROFILE", "laptop", "'local' or 'gpu'"),
        ("SERVE_APP_MAX_BODY_BYTES", "huge", "256MiB"),
        ("SERVE_APP_MAX_BODY_BYTES", "0", "greater than 0"),
        ("SERVE_APP_REQUEST_TIMEOUT_S", "nan", "finite"),
        ("SERVE_APP_ACCOUNT_ID", "a/b", "SERVE_APP_ACCOUNT_ID"),
        ("SERVE_APP_API_KEY", "short", "at least 16"),
        ("SERVE_APP_API_KEY", "spaces are not good here", "without spaces"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(tmp_path: Path, name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({"SERVE_APP_HOME": str(tmp_path), name: value})
    assert name in str(refused.value) and words in str(refused.value)
    if name.endswith("KEY"):
        assert value not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 8000", "Known: account_id"),
        ("- a", "name: value"),
        ("a: [", "not readable"),
        ("home: /x", "SERVE_APP_HOME"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings({"SERVE_APP_HOME": str(tmp_path)})
    assert str(tmp_path / "config.yaml") in str(refused.value) and words in str(refused.value)


def test_the_key_is_made_once_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path / "new")})
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: api_key(settings), range(32)))
    assert len(keys) == 1 and len(keys.pop()) >= 32
    assert os.stat(tmp_path / "new" / "api_key").st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["api_key"]


def test_a_set_key_wins_and_stays_out_of_reprs(tmp_path: Path) -> None:
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path), "SERVE_APP_API_KEY": "k" * 20})
    assert api_key(settings) == "k" * 20 and "k" * 20 not in repr(settings)
    assert not (tmp_path / "api_key").exists()


def test_the_cluster_secret_lasts_and_damage_is_named(tmp_path: Path) -> None:
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path)})
    secret = cluster_secret(settings)
    assert len(secret) == 32 and cluster_secret(settings) == secret
    (tmp_path / "cluster_secret").write_text("not hex")
    with pytest.raises(ConfigError, match="damaged"):
        cluster_secret(settings)


def test_listening_beyond_loopback_warns(tmp_path: Path) -> None:
    settings = load_settings({"SERVE_APP_HOME": str(tmp_path)}, host="0.0.0.0")
    assert len(settings.warnings) == 1 and "TLS" in settings.warnings[0]


def test_an_operators_own_value_wins() -> None:
    environ = {"RAY_AUTH_MODE": "disabled"}
    env.apply(env.serving_env(), environ)
    assert environ["RAY_AUTH_MODE"] == "disabled" and environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED" not in env.client_env()


def test_several_nodes_without_a_database_are_warned_of(tmp_path):
    def settings(**environ: str):
        return load_settings({"SERVE_APP_HOME": str(tmp_path), **environ})

    url = "postgresql+psycopg://u:secret-word@h/n"
    assert settings().warnings == settings(SERVE_APP_PROFILE="gpu", SERVE_APP_DATABASE=url).warnings == []
    [told] = settings(SERVE_APP_PROFILE="gpu").warnings
    assert "SERVE_APP_DATABASE=postgresql+psycopg://" in told
    # A password is neither shown nor repeated in a complaint.
    assert "secret-word" not in repr(settings(SERVE_APP_DATABASE=url))
    with pytest.raises(ConfigError, match="SERVE_APP_DATABASE: .*Use postgresql") as refused:
        settings(SERVE_APP_DATABASE="mysql://u:secret-word@h/n")
    assert "secret-word" not in str(refused.value)
    with pytest.raises(ConfigError, match="SERVE_APP_FILES: .*s3://BUCKET"):
        settings(SERVE_APP_FILES="gs://bucket")


def test_alerts_and_plans(tmp_path):
    def load(**environ: str):
        return load_settings({"SERVE_APP_HOME": str(tmp_path), **environ})

    found = load(SERVE_APP_PLAN="free", SERVE_APP_ALERT_SHARES="90, 100", SERVE_APP_ALERT_URL="https://a.example/x?y=z")
    assert (found.plan, found.alert_shares, found.alert_private) == ("free", (90, 100), False)
    assert not found.ledger_fsync and load(SERVE_APP_LEDGER_FSYNC="true").ledger_fsync
    made = alert_secret(found)
    assert made == alert_secret(load()) and made.startswith("whsec_") and len(base64.b64decode(made[6:])) == 32
    assert stat.S_IMODE((tmp_path / "alert_secret").stat().st_mode) == 0o600
    assert alert_secret(load(SERVE_APP_ALERT_SECRET=made)) == made and made not in repr(
        load(SERVE_APP_ALERT_SECRET=made)
    )
    for name, wrong in {
        "SERVE_APP_PLAN": "gold",
        "SERVE_APP_ALERT_SHARES": "50,120",
        "SERVE_APP_ALERT_URL": "ftp://a.example",
        "SERVE_APP_ALERT_SECRET": "whsec_c2hvcnQ=",
        "SERVE_APP_STORE_AWAY_S": "-1",
    }.items():
        with pytest.raises(ConfigError, match=name) as caught:
            load(**{name: wrong})
        assert name != "SERVE_APP_ALERT_SECRET" or wrong not in str(caught.value)
