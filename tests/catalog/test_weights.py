"""Weights arrive as data, whole or not at all, and never as something that runs."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from serve_app.catalog import CatalogError, Weights, load_catalog
from serve_app.catalog.records import Wheel
from serve_app.catalog.weights import ALLOWED, REFUSED, TOKENIZER_FILES, files_of_pipeline, resolve, tokenizer_directory


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A small real wheel that pip finds in a directory; it holds data, code, and a way out of the folder."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_weights_for_test-1.0-py3-none-any.whl"
    info = "tiny_weights_for_test-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('imported')")
        archive.writestr("tiny/model/config.json", "{}")
        archive.writestr("tiny/model/model.safetensors", b"\0" * 4096)
        archive.writestr("tiny/model/1_Pooling/config.json", "{}")
        archive.writestr("tiny/model/modeling_tiny.py", "raise SystemExit('imported')")
        archive.writestr("tiny/model/pytorch_model.bin", b"pickle")
        archive.writestr("tiny/model/../../../escaped.json", "{}")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights-for-test\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(
        name="tiny-weights-for-test",
        version="1.0",
        sha256=digest,
        size=path.stat().st_size,
        folder="tiny/model",
    )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_is_unzipped_as_data_only(wheel: Wheel, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    home = tmp_path / "home"
    found = resolve(Weights(wheel=wheel), home, lambda *step: seen.append(step))
    assert files(found) == {"config.json", "model.safetensors", "1_Pooling/config.json"}
    assert not list(tmp_path.rglob("escaped.json"))
    assert seen[0] == ("tiny-weights-for-test==1.0", 0, wheel.size) and seen[-1][1] == seen[-1][2] == wheel.size
    assert [path.name for path in (home / "weights").iterdir() if path.is_dir()] == [found.name]


def test_a_second_look_fetches_nothing(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(Weights(wheel=wheel), tmp_path / "home")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert resolve(Weights(wheel=wheel), tmp_path / "home") == first


def test_many_at_once_agree_on_one_copy(wheel: Wheel, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(lambda _: resolve(Weights(wheel=wheel), tmp_path / "home"), range(3)))
    assert len(found) == 1 and "model.safetensors" in files(found.pop())


def test_another_content_than_pinned_is_refused_and_leaves_nothing(wheel: Wheel, tmp_path: Path) -> None:
    wrong = wheel.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(CatalogError, match="could not be fetched") as refused:
        resolve(Weights(wheel=wrong), tmp_path / "home", source="record.yaml")
    assert refused.value.source == "record.yaml" and refused.value.field == "weights.wheel"
    assert [path for path in (tmp_path / "home" / "weights").iterdir() if path.is_dir()] == []


def test_a_directory_with_only_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CatalogError, match=r"only pickles \(pytorch_model.bin\)"):
        resolve(Weights(path=str(tmp_path)), tmp_path / "home")


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CatalogError, match="no config.json"):
        resolve(Weights(path=str(tmp_path)), tmp_path / "home")


def test_a_pipeline_has_its_models_in_folders(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "diffusion_pytorch_model.bin").touch()
    with pytest.raises(CatalogError, match=r"only pickles \(diffusion_pytorch_model.bin\)"):
        resolve(Weights(path=str(tmp_path)), tmp_path / "home")
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").touch()
    assert resolve(Weights(path=str(tmp_path)), tmp_path / "home") == tmp_path


def test_of_a_pipeline_s_repository_no_copies_are_fetched() -> None:
    names = [
        "model_index.json", "README.md", "LICENSE.md", "all_in_one.safetensors", "all_in_one_fp16.safetensors",
        "unet/config.json", "unet/model.safetensors", "unet/model.fp16.safetensors", "unet/model.bin",
        "vae/config.json", "vae/model.fp16.safetensors", "vae/model.non_ema.safetensors", "tokenizer/vocab.json",
        "text/model-00001-of-00002.safetensors", "text/model.safetensors.index.json", "unet/code.py",
        "text/model.fp16-00001-of-00002.safetensors", "text/model.safetensors.index.fp16.json", "scheduler/x.json",
    ]  # fmt: skip
    assert files_of_pipeline(names) == [
        "model_index.json", "README.md", "LICENSE.md", "unet/config.json", "unet/model.safetensors", "vae/config.json",
        "vae/model.fp16.safetensors", "tokenizer/vocab.json", "text/model-00001-of-00002.safetensors",
        "text/model.safetensors.index.json", "scheduler/x.json",
    ]  # fmt: skip


def ask_hub(endpoint: str, home: Path) -> str:
    """What resolving me/mine says. In a process of its own: huggingface_hub reads its endpoint when
    imported.
    """
    code = (
        "import sys; from pathlib import Path; from serve_app.catalog import CatalogError, Weights\n"
        "from serve_app.catalog.weights import resolve\n"
        "weights = Weights(repo='me/mine', revision='main')\n"
        "try: print(resolve(weights, Path(sys.argv[1]), source='mine.yaml'))\n"
        "except CatalogError as error: print(error)"
    )
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_unreachable_hub_names_the_repository(tmp_path: Path) -> None:
    said = ask_hub("http://127.0.0.1:9", tmp_path)
    assert "mine.yaml: weights.repo: me/mine at main could not be fetched" in said


def test_a_repository_of_pickles_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    """The real hub client against a hub that answers with a list of files and notes what else is asked
    for.
    """
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path.split("?")[0])
            names = ("config.json", "pytorch_model.bin", "modeling_mine.py")
            body = {
                "id": "me/mine",
                "sha": "a" * 40,
                "siblings": [{"rfilename": name, "size": 1} for name in names],
            }
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said = ask_hub(f"http://127.0.0.1:{server.server_port}", tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert "me/mine at main has no safetensors, only formats that can run code" in said
    assert "/api/models/me/mine/revision/main" in asked
    assert not [path for path in asked if "resolve" in path or path.endswith((".bin", ".py", ".json"))]


def test_the_packaged_embedding_model_is_safetensors_and_tokenizer() -> None:
    """The real package (fetched by `make test`), pinned by hash in the record."""
    home = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser()
    catalog = load_catalog()
    model = "@cf/sentence-transformers/all-minilm-l6-v2"
    found = resolve(catalog[model].weights, home, source=catalog.source(model))
    digest = hashlib.sha256((found / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert {"config.json", "tokenizer.json", "1_Pooling/config.json"} <= files(found)
    assert not [name for name in files(found) if name.endswith((".py", ".bin", ".pt"))]


def test_a_tokenizer_needs_no_weights_to_be_fetched(tmp_path: Path) -> None:
    """The gateway's look at a Hugging Face repository: the hub is asked for small files only."""
    kept = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    all_files = [*kept, "model.safetensors", "pytorch_model.bin", "tokenizer_setup.py"]
    chosen = set(filter_repo_objects(all_files, allow_patterns=TOKENIZER_FILES, ignore_patterns=REFUSED))
    assert chosen == kept
    weights = set(filter_repo_objects(all_files, allow_patterns=ALLOWED, ignore_patterns=REFUSED))
    assert weights == kept | {"model.safetensors"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert tokenizer_directory(Weights(path=str(tmp_path)), tmp_path) == tmp_path.resolve()
