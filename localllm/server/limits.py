"""Limits on the size of client requests, and time limits."""

from __future__ import annotations

from dataclasses import dataclass

LOOKING = frozenset({"/metrics", "/slots", "/health", "/v1/health", "/props"})  # routes that monitors poll


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on requests and on their connections."""

    body_bytes: int = 32 << 20
    depth: int = 100  # maximum nesting of the JSON body
    items: int = 2_000_000  # maximum number of values in a body, including keys
    objects: int = 20_000  # maximum number of objects in a body; messages, parts and tools are read one by one
    requests: int = 256  # maximum open requests: running, streaming and queued
    client_requests: int = 64  # maximum open requests per client address or API key
    client_tokens: int = 0  # maximum prompt and output tokens per client and minute; 0: no limit
    connections: int = 1024
    header_seconds: float = 15.0  # timeout for the request line and headers, and between requests of a connection
    body_seconds: float = 60.0
    send_seconds: float = 60.0  # timeout for a client to accept sent data, after which the connection is closed
    ping_seconds: float = 15.0  # interval of keep-alive comments in an idle stream
