"""Logs as Serve sets them up in a replica, where stderr goes to the log as well."""

from __future__ import annotations

import builtins
import logging
import resource
import sys

from ray.serve._private import logging_utils
from ray.serve._private.common import ServeComponentType
from ray.serve.schema import LoggingConfig

import deployments


def test_a_log_that_cannot_be_written_is_left_unwritten(tmp_path, monkeypatch) -> None:
    """Python would tell of it on stderr, that is in the log, which cannot be written: without end. Requests failed
    behind their answers then, and connections with them.
    """
    assert deployments and not logging.raiseExceptions
    logger = logging.getLogger(logging_utils.SERVE_LOGGER_NAME)
    for owner, name in (
        (sys, "stdout"),
        (sys, "stderr"),
        (builtins, "print"),
        (logger, "propagate"),
        (logger, "level"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging_utils, "RAY_SERVE_LOG_TO_STDERR", False)
    logging_utils.configure_component_logger(
        component_name="gateway",
        component_id="one",
        component_type=ServeComponentType.REPLICA,
        logging_config=LoggingConfig(logs_dir=str(tmp_path)),
        max_bytes=1 << 20,
        backup_count=1,
        buffer_size=1000,
    )
    assert isinstance(sys.stderr, logging_utils.StreamToLogger)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for _ in range(50):
            logger.info("a line %s", "x" * 200)
            logger.error("and one that is written at once")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.error("the disk has room again")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 20_000 and "the disk has room again" in file.read_text()
    for handler in logger.handlers:
        handler.close()
