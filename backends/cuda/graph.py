"""CUDA graphs, which combine many launches into one. They use driver functions that PyCUDA 2026.1 does not wrap."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from localllm.backends.base import BackendError

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads and the garbage collector may make calls meanwhile


class Graph:
    """A graph captured from the launches that `work` queues on a stream. The buffers in use must outlive the graph."""

    def __init__(self, driver: Any, stream: int, work: Callable[[], None]) -> None:
        self._driver, self._stream = driver, ctypes.c_void_p(stream)
        self._launchable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        self._check(driver.cuStreamBeginCapture_v2(self._stream, RELAXED))
        try:
            work()
        finally:
            ended = driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
        self._check(ended)
        try:
            self._check(driver.cuGraphInstantiateWithFlags(ctypes.byref(self._launchable), graph, ctypes.c_uint64(0)))
        finally:
            driver.cuGraphDestroy(graph)

    def __call__(self) -> None:
        self._check(self._driver.cuGraphLaunch(self._launchable, self._stream))

    def destroy(self) -> None:
        """Free the graph; its context must still exist."""
        if self._launchable:
            self._driver.cuGraphExecDestroy(self._launchable)
            self._launchable = ctypes.c_void_p()

    def __del__(self) -> None:
        self.destroy()

    def _check(self, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            raise BackendError(f"CUDA graph: {(text.value or b'').decode() or f'error {result}'}")
