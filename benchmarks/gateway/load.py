"""A small HTTP/1.1 load generator: keep-alive connections on raw asyncio streams, so that it costs little itself."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One run. ``latencies`` in seconds; ``answers`` are statuses and bodies, kept to be checked when nothing is
    measured any more. A request that got none has status 0 and says why.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    answers: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies) / self.seconds

    @property
    def p50_ms(self) -> float:
        return 1000 * statistics.median(self.latencies)


class Connection:
    """One keep-alive connection."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and whole body. Raises OSError or EOFError where the connection breaks."""
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._reader, self._writer
        assert reader is not None and writer is not None
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._host}:{self._port}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        if b"transfer-encoding: chunked" not in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            return status, await reader.readexactly(length)
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        return status, b"".join(parts)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def load(
    host: str, port: int, path: str, headers: dict[str, str], body: bytes, *, concurrency: int, requests: int
) -> Outcome:
    """``requests`` requests over ``concurrency`` connections."""
    outcome, left = Outcome(), requests

    async def client() -> None:
        nonlocal left
        connection = Connection(host, port)
        while left > 0:
            left -= 1
            started = time.perf_counter()
            try:
                answer = await connection.request(path, headers, body)
            except (OSError, EOFError) as error:
                answer = 0, repr(error).encode()
                connection.close()
                connection = Connection(host, port)
            outcome.latencies.append(time.perf_counter() - started)
            outcome.answers.append(answer)
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    outcome.seconds = time.perf_counter() - started
    return outcome
