"""Imports Ray, or says how to get it. Nothing of Ray is imported before it is used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from localllm.base.notices import Notice, Setting
from localllm.cluster.errors import ClusterError

# Ray reads its settings from the environment, when it is imported and when it starts processes.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # sends nothing to Ray's authors
    "RAY_SCHEDULER_EVENTS": "0",  # no notes about scaling, which is not used
    "RAY_DEDUP_LOGS": "0",  # prints errors at once, from the thread that the command line mutes
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds to try an address, and a token that it refuses
    "RAY_health_check_period_ms": "500",  # of the head: a computer that is gone is noticed after 2 s, not after 15
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # stages see the graphics cards, though they reserve none from Ray
}
DRIVER = {"RAY_BACKEND_LOG_LEVEL": "fatal"}  # of a command: otherwise its core prints errors on stderr
OLDEST = (2, 60)  # Serve of Ray 2.55 accepts pickled requests without a token (seen in its source)
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the address of this machine is 127.0.0.1, on any system


def connected_ray() -> Any:
    """Return the package `ray` if this process is connected to a cluster, otherwise None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def check_package(for_what: str = "") -> None:
    """Raise ClusterError if Ray or pyzmq is not installed."""
    if any(find_spec(name) is None for name in ("ray", "zmq")):
        raise ClusterError(Notice(for_what or Setting("ray"), " needs Ray: pip install 'localllm[ray]'"))
    found = version("ray")
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) < OLDEST:
        problem = f"Ray {found} lets strangers run programs through its replicas' ports; "
        raise ClusterError(f"{problem}update it: pip install -U 'localllm[ray]'")


def ray_package() -> Any:
    """Return the package `ray`, imported with our settings."""
    for name, value in (SETTINGS | DRIVER).items():
        os.environ.setdefault(name, value)
    return import_module("ray")
