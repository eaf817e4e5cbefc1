"""Limits for the responses that huggingface_hub reads into memory: lists, error texts and redirects. `fetch.py` limits
files.

The library has no limits. Without these, a hostile hub could fill the memory, or occupy a download forever.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MOST_BYTES = 32 << 20  # a list of 50,000 files has about 20 MB
MOST_SECONDS = 60.0
_GZIP = 16 + zlib.MAX_WBITS
_brief: ContextVar[bool] = ContextVar("brief", default=False)


@contextmanager
def brief() -> Iterator[None]:
    """Limit all responses in the `with`. Outside, only those without a file are limited."""
    token = _brief.set(True)
    try:
        yield
    finally:
        _brief.reset(token)


def limit_responses(session: Any, failure: type[Exception]) -> None:
    """Add the limits to huggingface_hub's session. `failure` is its class of network errors."""
    hooks = session.event_hooks
    if any(isinstance(each, _ResponseHook) for each in hooks["response"]):
        return
    hooks["request"] = [*hooks["request"], _ask_gzip]
    hooks["response"] = [*hooks["response"], _ResponseHook(failure)]
    session.event_hooks = hooks


def _ask_gzip(request: Any) -> None:
    if _brief.get():
        request.headers["Accept-Encoding"] = "gzip"


class _ResponseHook:
    """Limits the body of a response. Beyond the limits, reading it raises an error."""

    def __init__(self, failure: type[Exception]) -> None:
        self._failure = failure
        package = importlib.import_module(failure.__module__.partition(".")[0])

        class Body(package.SyncByteStream):  # type: ignore[name-defined, misc]
            def __init__(self, inner: Any, parts: Callable[[], Iterator[bytes]]) -> None:
                self._inner, self._parts = inner, parts

            def __iter__(self) -> Iterator[bytes]:
                yield from self._parts()

            def close(self) -> None:
                self._inner.close()

        self._body = Body

    def __call__(self, response: Any) -> None:
        if not _brief.get() and response.status_code in (200, 206):
            return
        coding = response.headers.pop("Content-Encoding", "identity").strip().lower()
        if coding not in ("identity", "gzip"):
            raise self._failure(f"the answer has an unknown encoding ({coding[:20]})")
        inner = response.stream
        response.stream = self._body(inner, lambda: self._parts(inner, coding == "gzip"))

    def _parts(self, inner: Any, packed: bool) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(_GZIP)
        left, end = MOST_BYTES, time.monotonic() + MOST_SECONDS
        for piece in inner:
            try:
                part = unpacker.decompress(piece, left + 1) if packed else piece
            except zlib.error:
                raise self._failure("the answer is damaged") from None
            left -= len(part)
            if left < 0 or time.monotonic() > end:
                raise self._failure(f"the answer is longer than {MOST_BYTES >> 20} MiB or {MOST_SECONDS:.0f} s")
            yield part
