"""After hostile requests, the server's memory returns to about the level of a warm server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.base.machine.heap import heap_in_use
from tests.fuzz.http import Server, exchange, serving

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or heap_in_use() is None, reason="only glibc's heap is measured and returned"
)
MIB = 1 << 20
USUAL = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
LARGE = {"content": "x", "unknown": [[0]] * 400_000}
WAIT = 30  # timeout in seconds; an idle worker frees its memory earlier
MORE = 110 * MIB  # allowed growth in bytes, including 48 MB for the largest cached grammars


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as made:
        yield made


def _status(server: Server, path: str, body: Any) -> int:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return int(exchange(server.port, head.encode() + data, "127.0.0.1").split(b" ")[1])


def _answered(server: Server, schema: Any) -> int:
    return _status(server, "/completion", {"prompt": "x", "n_predict": 3, "json_schema": schema})


def _above(server: Server, warm: int) -> int:
    """Wait until the memory is at most `MORE` above `warm`, or until the timeout, and return the difference."""
    end = time.monotonic() + WAIT
    while (above := server.memory - warm) > MORE and time.monotonic() < end:
        time.sleep(0.1)
    return above


def test_memory_of_compiled_schemas_and_large_bodies_is_returned(server: Server) -> None:
    assert _answered(server, USUAL) == 200
    assert _status(server, "/tokenize", {"content": "a " * 200_000}) == 400
    warm = server.memory
    for number in range(6):  # each compiled schema takes 40 MB
        assert _answered(server, {"type": "integer", "multipleOf": 84_401 + 2 * number}) == 200
    assert _status(server, "/tokenize", LARGE) == 200
    assert _above(server, warm) < MORE
