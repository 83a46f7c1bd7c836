"""What a cluster has beside its pods: a PostgreSQL and an S3 that pods reach over the network."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import boto3
from sqlalchemy.engine import make_url


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _serve(listener: socket.socket, target: tuple[str, int]) -> None:
    while True:
        try:
            ours, _ = listener.accept()
        except OSError:
            return
        theirs = socket.create_connection(target)
        for pair in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=_pass_on, args=pair, daemon=True).start()


@contextlib.contextmanager
def reachable(url: str, address: str) -> Iterator[str]:
    """A database's URL at ``address``, behind which is the one on loopback."""
    inner = make_url(url)
    with socket.create_server((address, 0)) as listener:
        target = (inner.host or "127.0.0.1", inner.port or 5432)
        threading.Thread(target=_serve, args=(listener, target), daemon=True).start()
        yield inner.set(host=address, port=listener.getsockname()[1]).render_as_string(hide_password=False)


@contextlib.contextmanager
def bucket(address: str, name: str) -> Iterator[dict[str, str]]:
    """Variables by which a bucket is found: S3's protocol, files in this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }  # fmt: skip
    try:
        _client(found).create_bucket(Bucket=name)
        yield found
    finally:
        server.stop()


def _client(found: dict[str, str]) -> object:
    return boto3.client(
        "s3", region_name=found["AWS_REGION"], endpoint_url=found["AWS_ENDPOINT_URL"],
        aws_access_key_id=found["AWS_ACCESS_KEY_ID"], aws_secret_access_key=found["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip


def objects(found: dict[str, str], name: str) -> list[str]:
    listed = _client(found).list_objects_v2(Bucket=name)  # type: ignore[attr-defined]
    return [each["Key"] for each in listed.get("Contents", ())]
