"""What workers import, wherever the server is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.ray_private.head import job_config, others_may_write

# Tells in which folders a worker of Ray looks for modules.
TELLS = """
import sys
from pathlib import Path
from serve_app.cluster import LocalCluster
from serve_app.config import load_settings
cluster = LocalCluster(load_settings(home=Path(sys.argv[1])))
try:
    cluster.start_ray()
    import ray
    print(ray.get(ray.remote(lambda: (sys.path, __import__("tomllib").__file__)).remote()))
finally:
    cluster.stop()
"""


def test_folders_that_others_may_write_to_are_known(tmp_path):
    (tmp_path / "own" / "below").mkdir(parents=True)
    assert not others_may_write(str(tmp_path / "own" / "below"))
    (tmp_path / "own").chmod(0o777)
    assert others_may_write(str(tmp_path / "own")) and others_may_write(str(tmp_path / "own" / "below"))
    # As the place of temporary files is: what is there stays, and anything may come.
    (tmp_path / "own").chmod(0o1777)
    assert others_may_write(str(tmp_path / "own")) and not others_may_write(str(tmp_path / "own" / "below"))
    assert others_may_write(str(tmp_path / "nowhere"))
    if os.getuid() == 0:
        os.chown(tmp_path / "own" / "below", 65534, 65534)
        assert others_may_write(str(tmp_path / "own" / "below"))


def test_a_driver_names_no_folder_that_others_may_write_to(tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    config = job_config()
    config._py_driver_sys_path.extend([str(tmp_path), str(tmp_path / "all")])
    assert list(config._get_proto_job_config().py_driver_sys_path) == [str(tmp_path)]


@pytest.mark.slow
def test_workers_import_nothing_from_where_others_may_write(tmp_path: Path) -> None:
    folder, taken = tmp_path / "all", tmp_path / "taken"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("json", "logging", "tomllib", "msgspec"):
        (folder / f"{name}.py").write_text(f"open({str(taken)!r}, 'w')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = [sys.executable, "-P", "-c", TELLS, str(tmp_path / "home")]
    told = subprocess.check_output(asked, cwd=folder, env=environment, text=True)
    assert str(folder) not in told and "tomllib" in told and not taken.exists()
