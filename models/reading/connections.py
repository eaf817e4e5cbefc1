"""Metadata keys of hyper-connections: the number of residual streams, and how they are mixed."""

from __future__ import annotations

from localllm.models.architecture import Architecture
from localllm.models.config import ConnectionConfig
from localllm.models.errors import ModelError
from localllm.models.reading.bounds import MAX_FACTOR, MAX_WIDTH
from localllm.models.reading.keys import Keys

_MAX_STREAMS = 8  # maximum streams that kernels are compiled for; known models have 4
_MAX_ITERATIONS = 1000  # known models have 20


def read_connections(keys: Keys, row: Architecture) -> ConnectionConfig | None:
    """Read the hyper-connection config, or None; "independent" streams are never mixed."""
    if not row.connections:
        return None
    streams = keys.integer("hyper_connection.count", 1, _MAX_STREAMS)
    if row.connections == "low_rank":
        if streams < 2:
            raise ModelError(f"{keys.prefix}hyper_connection.count: expected at least 2 streams, found {streams}")
        rank = keys.integer("hyper_connection.low_rank", 1, MAX_WIDTH)
        return ConnectionConfig(streams, 0.0, 0.0, 0.0, 0, rank)
    eps = keys.real("hyper_connection.epsilon", 0.0, 1.0)
    if row.connections == "independent":
        magnitude = keys.real("hyper_connection.magnitude", 0.0, MAX_FACTOR)
        return ConnectionConfig(streams, eps, magnitude, eps, 0)
    iterations = keys.integer("hyper_connection.sinkhorn_iterations", 0, _MAX_ITERATIONS)
    return ConnectionConfig(streams, eps, 2.0, 0.0, max(1, iterations))  # the first iteration always runs
