"""What a client may send, and how long anything may take."""

from __future__ import annotations

from dataclasses import dataclass

LOOKING = frozenset({"/metrics", "/slots", "/health", "/v1/health", "/props"})  # routes of programs that watch


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests and of the connections that carry them."""

    body_bytes: int = 32 << 20
    depth: int = 100  # JSON inside JSON
    items: int = 2_000_000  # values of a body, keys included
    objects: int = 20_000  # of a body: messages, parts and tools are read one by one
    requests: int = 256  # open at once: running, streaming and queued
    client_requests: int = 64  # of one client, or of one API key
    client_tokens: int = 0  # of one client in a minute: evaluated and written; 0: no limit
    connections: int = 1024
    header_seconds: float = 15.0  # for the first line and the headers, and between requests of a connection
    body_seconds: float = 60.0
    send_seconds: float = 60.0  # for a client to take what was sent; then it is cut off
    ping_seconds: float = 15.0  # between comments in a silent stream
