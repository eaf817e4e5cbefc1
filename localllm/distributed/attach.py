"""Connects this process to a Ray cluster: named by its address, found on this machine, or started here."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from localllm.base.files.regular import open_regular
from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.cluster.errors import ClusterError
from localllm.distributed.head import watched
from localllm.distributed.membership import (
    HEAD,
    LOOPBACK,
    Node,
    free_port,
    membership,
    new_token,
    reachable,
    split_address,
    use,
)
from localllm.distributed.package import check_package, connected_ray, ray_package
from localllm.distributed.quiet import quiet, silent
from localllm.options.ray import AUTO, is_address

_VARIABLE = "RAY_ADDRESS"  # as Ray itself reads it
_CURRENT = "ray/ray_current_cluster"  # in the folder for temporary files: the cluster that `ray start` started


@contextmanager
def attached(address: str, tell: Callable[[str], None] = lambda text: None) -> Iterator[Any]:
    """Connect to the cluster that the user names, and yield the package `ray`. Raises ClusterError.

    A process that is already connected (a replica, a test) stays so. A cluster that starts here ends with the
    block.
    """
    if (connected := connected_ray()) is not None:
        yield connected
        return
    check_package()
    with ExitStack() as stack:
        found = _found() if address == AUTO else address
        if not found:
            tell("starting Ray on this machine")
            found, token = f"{LOOPBACK}:{free_port()}", new_token()
            port = split_address(found)[1]
            node = stack.enter_context(Node(token, LOOPBACK, [*HEAD, f"--port={port}"]))
            use(token, LOOPBACK)
            node.wait(found)
        else:
            known = membership()
            if known is not None and known.address == found:
                use(known.token, split_address(found)[0])
            if not reachable(found):
                raise ClusterError(f"nothing answers at {found}; `localllm worker` starts a cluster there")
        ray = ray_package()  # Ray reads its settings when it is imported
        stack.enter_context(quiet())
        is_gone = stack.enter_context(watched(found, tell))
        connect(ray, found)
        stack.callback(lambda: None if is_gone() else _leave(ray))
        yield ray


def has_cluster() -> bool:
    """Return whether this process or this machine belongs to a cluster."""
    check_package()
    return connected_ray() is not None or bool(_found())


def _leave(ray: Any) -> None:
    with suppress(Exception):
        ray.shutdown()


def connect(ray: Any, address: str) -> None:
    """Connect as a driver. Raises ClusterError with a reason in one line.

    Ray connects in another thread. In the main thread, it would replace the handlers of signals, so a process that is
    asked to end meanwhile would not.
    """
    failed: list[Exception] = []

    def init() -> None:
        try:
            ray.init(
                address=address, log_to_driver=False, configure_logging=True, logging_level=logging.CRITICAL,
                namespace="localllm",
            )  # fmt: skip
        except Exception as error:  # Ray raises many types, some of them RuntimeError with several lines
            failed.append(error)

    thread = threading.Thread(target=init, name="connecting", daemon=True)
    with silent():
        thread.start()
        thread.join()
    if failed:
        _leave(ray)
        raise ClusterError(Notice(f"cannot join the Ray cluster at {address}: ", reason_of(failed[0]))) from None


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error of Ray, or advice for the usual errors."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "AuthenticationError" or "authentication" in text.lower():
        advice = "it does not accept the token; use the token that `localllm worker` printed there ("
        return Notice(advice, Setting("token_file"), ")")
    if "ersion mismatch" in text:
        return f"another version of Ray or Python runs there; {printable(text, 300)}"
    return printable(text.split(". ")[0], 300) or type(error).__name__


def _found() -> str:
    """Return the address of the cluster of this machine, or ""."""
    given = os.environ.get(_VARIABLE, "")
    if given and given not in ("local", AUTO):
        if not is_address(given):
            raise ClusterError(f"{_VARIABLE}: {printable(given, 100)!r} is not HOST:PORT, such as 192.168.1.7:7380")
        return given
    if given == "local":
        return ""
    if (known := membership()) is not None:
        return known.address
    with suppress(OSError, ValueError), open_regular(Path(tempfile.gettempdir(), _CURRENT), own=True) as file:
        found = file.read().decode().strip()
        if is_address(found) and reachable(found):
            return found
    return ""
