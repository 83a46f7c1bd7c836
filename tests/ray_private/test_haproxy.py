"""What HAProxy answers by itself, when no gateway can be reached."""

from __future__ import annotations

import json

import pytest

from serve_app.api.errors import ModelLoading, openai_body
from serve_app.ray_private import haproxy_config


def test_its_own_answer_is_one_of_ours() -> None:
    head, _, body = haproxy_config.unavailable().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["Content-Type"] == "application/json" and headers["Retry-After"].isdigit()
    assert int(headers["Content-Length"]) == len(body)
    like = openai_body(ModelLoading("@cf/a/b", retry_after=2.0))
    for shown in (json.loads(body), json.loads(haproxy_config.no_route())):
        assert shown.keys() == like.keys() and shown["error"].keys() == like["error"].keys()
    assert json.loads(body)["errors"][0]["code"] == like["errors"][0]["code"]


@pytest.mark.parametrize(("files", "most"), [(-1, 16384), (1 << 20, 16384), (20_000, 7800), (1024, 256)])
def test_connections_fit_into_the_limit_on_open_files(files: int, most: int) -> None:
    assert haproxy_config.connections(files) == most
