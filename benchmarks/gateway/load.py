"""A small HTTP/1.1 load generator: keep-alive connections on raw asyncio streams, so that it costs little itself."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Latencies in seconds of one run; ``events`` counts server-sent events."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    events: int = 0
    errors: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def p50_ms(self) -> float:
        return 1000 * statistics.median(self.latencies)


class Connection:
    """One keep-alive connection. ``request`` returns status, seconds to the body's first byte, and the events in it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, float, int]:
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._reader, self._writer
        assert reader is not None and writer is not None
        lines = [f"POST {path} HTTP/1.1", f"Host: {self._host}:{self._port}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        started = time.perf_counter()
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        lowered = head.lower()
        first, events = 0.0, 0
        if b"transfer-encoding: chunked" in lowered:
            while True:
                size = int(await reader.readuntil(b"\r\n"), 16)
                data = await reader.readexactly(size + 2)
                first = first or time.perf_counter() - started
                if size == 0:
                    break
                events += data.count(b"data: ")
        else:
            length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            first = time.perf_counter() - started
        return status, first, events

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
                status, first, events = await connection.request(path, headers, body)
            except (OSError, asyncio.IncompleteReadError):
                outcome.errors += 1
                connection = Connection(host, port)
                continue
            outcome.latencies.append(time.perf_counter() - started)
            outcome.first_bytes.append(first)
            outcome.events += events
            outcome.errors += status != 200
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    outcome.seconds = time.perf_counter() - started
    return outcome
