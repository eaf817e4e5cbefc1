"""An account is an API key, or a client address if no keys are set. Limits and fairness apply per account.

`ACCOUNT` holds the account of the request that the current task handles, so that all work of the task counts for this
account.
"""

from __future__ import annotations

import ipaddress
from contextvars import ContextVar

ACCOUNT: ContextVar[str] = ContextVar("account", default="")
_NETWORK = 64  # bits of an IPv6 address that identify a site; its hosts choose the other bits


def account_of_address(host: str) -> str:
    """Return the account of an address: the address itself or, for IPv6, the first address of its /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_loopback or address.is_link_local:
        return str(address)
    return str(ipaddress.IPv6Network((address, _NETWORK), strict=False).network_address)
