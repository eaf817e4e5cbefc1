"""Clients of `soak.py` that disconnect before, during and after their request, and clients that never read."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from typing import Any

from soak_requests import MAKERS, messages, text

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a TCP reset, so the server's next write fails
LONG: Mapping[str, Any] = {"stream": True, "ignore_eos": True, "temperature": 0.9}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Wait = Callable[[float], Coroutine[Any, Any, None]]


def endless(chance: Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request for a long stream, in a random API."""
    chat = {"messages": messages(chance)}
    return chance.choice(
        [
            ("/v1/chat/completions", {**chat, **LONG, "max_tokens": 300}),
            ("/v1/chat/completions", {**chat, **LONG, "max_tokens": 300, "n": 2}),
            ("/v1/messages", {**chat, "model": "any", "max_tokens": 300, "stream": True}),
            ("/v1/responses", {"input": text(chance), "max_output_tokens": 300, "stream": True}),
            ("/api/chat", {**chat, "model": "demo", "options": {"num_predict": 300}}),
            ("/completion", {"prompt": text(chance), "n_predict": 300, **LONG}),
        ]
    )


def request(path: str, content: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def _open(port: int, small: bool = False) -> Connection:
    made = socket.socket()
    made.setblocking(False)
    if small:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=made, limit=4096 if small else 1 << 16)


def _leave(connection: Connection, chance: Random) -> None:
    """Close a connection, with a TCP reset in half of the cases."""
    writer = connection[1]
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    else:
        writer.close()


async def half_a_request(port: int, chance: Random, wait: Wait) -> None:
    one = chance.choice(MAKERS)(chance)
    sent = request(one.path, one.content)
    connection = await _open(port)
    connection[1].write(sent[: chance.randrange(len(sent))])
    await wait(chance.random())
    _leave(connection, chance)


async def after_the_request(port: int, chance: Random, wait: Wait) -> None:
    path, body = endless(chance)
    connection = await _open(port)
    connection[1].write(request(path, json.dumps({**body, "stream": chance.random() < 0.7}).encode()))
    await wait(chance.random() * 0.5)
    _leave(connection, chance)


async def after_the_headers(port: int, chance: Random, wait: Wait) -> None:
    path, body = endless(chance)
    connection = await _open(port)
    connection[1].write(request(path, json.dumps(body).encode()))
    while (await connection[0].readline()).strip():
        pass
    _leave(connection, chance)


async def after_a_few_tokens(port: int, chance: Random, wait: Wait) -> None:
    path, body = endless(chance)
    connection = await _open(port)
    connection[1].write(request(path, json.dumps(body).encode()))
    for _ in range(chance.randrange(12, 60)):
        await connection[0].readline()
    _leave(connection, chance)


async def never_reads(port: int, chance: Random, wait: Wait) -> None:
    """Request a large stream, and read nothing for longer than the server waits."""
    connection = await _open(port, small=True)
    body = {"prompt": text(chance), "n_predict": 400, **LONG, "n_probs": 50}
    connection[1].write(request("/completion", json.dumps(body).encode()))
    await wait(chance.choice((2, 15)))
    _leave(connection, chance)


KINDS: Mapping[str, Callable[[int, Random, Wait], Coroutine[Any, Any, None]]] = {
    "vanished in its request": half_a_request,
    "vanished after its request": after_the_request,
    "vanished after the headers": after_the_headers,
    "vanished after a few tokens": after_a_few_tokens,
    "never read": never_reads,
}
