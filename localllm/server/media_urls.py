"""Fetches a picture or a sound from an http(s) URL, if the operator allows it.

A client chooses the URL, so it must not reach the server's own network: a name is resolved once, every address must be
public and of another computer, the connection goes to that address, and each redirect is checked in the same way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from contextlib import closing, suppress
from time import monotonic
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from localllm.base.printable import printable
from localllm.media import MediaError

REDIRECTS = 3
_CHUNK = 1 << 16
_MOST_URL = 8192
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")  # Python also calls fec0::1 (site-local) and ::127.0.0.1 global
_AGENT = {"User-Agent": "localllm", "Accept": "image/*, audio/*", "Accept-Encoding": "identity"}


class _Answer(NamedTuple):
    content: bytes
    redirect: str  # where the answer leads, or ""


def fetch(url: str, most: int, seconds: float) -> bytes:
    """Return the content of a URL of at most `most` bytes. Raises MediaError, which names the host only."""
    deadline = monotonic() + seconds
    for _ in range(REDIRECTS + 1):
        parts = _checked(url)
        host = printable(parts.hostname or "", 200)
        try:
            answer = _get(parts, most, deadline)
        except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
            late = monotonic() >= deadline
            reason = "takes too long" if late or isinstance(error, TimeoutError) else "the file cannot be fetched"
            raise MediaError(f"{host}: {reason}; send the file itself as a data URL") from None
        if not answer.redirect:
            return answer.content
        url = urljoin(url, answer.redirect)
    raise MediaError(f"{host}: redirects more than {REDIRECTS} times; send the file itself as a data URL")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url) if len(url) <= _MOST_URL and url.isprintable() and " " not in url else None
        port = parts.port if parts is not None else None
    except ValueError:
        parts, port = None, None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise MediaError("expected an http or https URL; send the file itself as a data URL")
    if parts.username is not None or parts.password is not None:
        raise MediaError("a URL must not have a user name or a password; send the file itself as a data URL")
    return parts


def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raise MediaError unless all of them are public."""
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(_is_public(each) and not _is_own(each) for each in found):
        raise MediaError(f"{printable(host, 200)}: not a public address; send the file itself as a data URL")
    return found


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is None and ip not in _UNICAST:
            return False
        ip = ip if inner is None else inner
    return ip.is_global and not ip.is_multicast


def _is_own(address: str) -> bool:
    """Whether an address is this computer's: packets to it would have it as their source. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0]) == address
    return False  # it cannot be reached


def _get(parts: SplitResult, most: int, deadline: float) -> _Answer:
    """Send one request to a checked address."""
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = addresses(host, port)[0]
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    connection = http.client.HTTPConnection(host, port, timeout=left)
    with closing(connection), closing(socket.create_connection((address, port), timeout=left)) as plain:
        used = ssl.create_default_context().wrap_socket(plain, server_hostname=host) if secure else plain
        ended = threading.Timer(max(deadline - monotonic(), 0), _cut, (used,))  # also ends a server that drips
        ended.daemon = True
        ended.start()
        try:
            connection.sock = used
            connection.request("GET", parts._replace(scheme="", netloc="", fragment="").geturl() or "/", headers=_AGENT)
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308) and (target := answer.headers.get("Location")):
                return _Answer(b"", target)
            if answer.status != 200:
                shown = printable(host, 200)
                raise MediaError(f"{shown}: answered with status {answer.status}; send the file itself as a data URL")
            content = _read(answer, host, most)
            if monotonic() >= deadline:  # `_cut` looks like the end of the file
                raise TimeoutError
            return _Answer(content, "")
        finally:
            ended.cancel()
            used.close()


def _read(answer: http.client.HTTPResponse, host: str, most: int) -> bytes:
    found = bytearray()
    while piece := answer.read(_CHUNK):
        found += piece
        if len(found) > most:
            raise MediaError(f"{printable(host, 200)}: sends more than {most} bytes; send a smaller file")
    if answer.length:
        raise http.client.IncompleteRead(b"")
    return bytes(found)


def _cut(used: socket.socket) -> None:
    with suppress(OSError):
        used.shutdown(socket.SHUT_RDWR)
