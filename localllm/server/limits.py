"""Limits on the size of client requests, and time limits."""

from __future__ import annotations

from dataclasses import dataclass

LOOKING = frozenset({"/metrics", "/slots", "/health", "/v1/health", "/props"})  # routes that monitors poll


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on requests and on their connections."""

    body_bytes: int = 32 << 20
    depth: int = 100  # nesting of JSON
    items: int = 2_000_000  # values in a body, including keys
    objects: int = 20_000  # objects in a body; messages, parts and tools are read one by one
    requests: int = 256  # open requests: running, streaming and queued
    client_requests: int = 64  # open requests per client or API key
    client_tokens: int = 0  # tokens per client and minute, prompt and output; 0: no limit
    connections: int = 1024
    header_seconds: float = 15.0  # timeout for the request line and headers, and between requests of a connection
    body_seconds: float = 60.0
    send_seconds: float = 60.0  # time for a client to accept sent data before the connection is closed
    ping_seconds: float = 15.0  # time between comments in an idle stream
