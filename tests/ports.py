"""Free ports of this machine, for the nodes of a cluster in tests and benchmarks."""

from __future__ import annotations

import socket

GROUP = 100  # ports between the first ones of two nodes


def free_ports(nodes: int = 1) -> int:
    """Return the first of as many groups of ports, `GROUP` apart. The first ten of each group are free."""
    for first in range(21_000, 32_000, GROUP * nodes):
        try:
            for group in range(first, first + GROUP * nodes, GROUP):
                for port in range(group, group + 10):
                    with socket.create_server(("", port)):
                        pass
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
