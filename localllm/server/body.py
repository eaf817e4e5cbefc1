"""Read an untrusted request body as one JSON object within limits.

Python's JSON parser accepts duplicate keys (the last value wins), NaN, unlimited digits and lone surrogates. All four
are rejected here, so that the values checked are the values used.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from localllm.base.printable import printable
from localllm.server.errors import BadRequest, TooLarge, TooSlow
from localllm.server.lanes import Lane
from localllm.server.limits import ServerLimits
from localllm.server.turn import Json

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # a string, or the remainder after an unpaired quote
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_DIGITS = 400  # maximum digits of an integer
LARGE = 256 << 10  # bytes; parsing a larger body would cause a noticeable pause in streams
BODIES = "localllm.bodies"  # key of the lane for large bodies in the ASGI scope


async def read_json(request: Request, limits: ServerLimits) -> Json:
    """Read the body as one JSON object, ignoring its Content-Type; raise BadRequest, TooLarge or TooSlow."""
    body = await read_body(request, limits)
    if len(body) < LARGE:
        return parse(body, limits)
    lane: Lane = request.scope.get(BODIES) or Lane("body")
    return await lane.run(lambda: parse(body, limits))


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """Read the whole body; raise TooLarge or TooSlow."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _body(request, limits.body_bytes)
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {limits.body_seconds:g} seconds") from None


async def _body(request: Request, most: int) -> bytes:
    promised = request.headers.get("content-length", "")
    if promised.isdigit() and len(promised) <= 20 and int(promised) > most:
        raise TooLarge(f"the body has {promised} bytes; the limit is {most}")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise TooLarge(f"the body has more than {most} bytes, which is the limit")
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


class ClientGone(Exception):
    """The client closed the connection, so no response can be delivered."""


def parse(body: bytes, limits: ServerLimits) -> Json:
    """Parse `body` as a JSON object."""
    if not body.strip():
        raise BadRequest("the body is empty; send a JSON object")
    _check_items(body, limits)
    try:
        data = json.loads(
            body.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _too_deep(limits.depth) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadRequest(f"the body is not valid JSON: {error.msg} ({where})") from None
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object, such as {...}")
    _check_depth(data, limits.depth)
    if _HALF.search(body):
        _check_characters(data)
    return data


def _check_items(body: bytes, limits: ServerLimits) -> None:
    """Reject a body with too many values before parsing it: a list of 2 bytes takes 64 bytes of memory."""
    for _ in range(2):
        many, objects = _marks(body) > limits.items, body.count(b"{") > limits.objects
        if not many and not objects:
            return
        body = _STRING.sub(b"", body)
    what, most = ("values", limits.items) if many else ("objects", limits.objects)
    raise TooLarge(f"the body has more than {most} {what}, which is the limit")


def _marks(body: bytes) -> int:
    return sum(body.count(mark) for mark in (b",", b"[", b"{", b":"))


def _check_depth(data: Any, most: int) -> None:
    level: list[Any] = [data]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer) if type(inner) is dict or type(inner) is list]
        if not level:
            return
    raise _too_deep(most)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value


def _too_deep(most: int) -> BadRequest:
    return BadRequest(f"the body is nested more than {most} levels deep")


def _check_characters(data: Json) -> None:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("a text in the body has an unpaired surrogate (\\ud800 to \\udfff)") from None


def _object(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadRequest(f"the key {printable(twice)!r} occurs twice in one object")
    return found


def _constant(name: str) -> Any:
    raise BadRequest(f"{name} is not JSON; give a number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest(f"the number {printable(text, 40)} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise BadRequest(f"a whole number has {len(text)} digits; the limit is {_DIGITS}")
    return int(text)
