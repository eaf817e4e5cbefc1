"""Who may use the server: checks before any request is read.

Host     a page can make its own name point to this machine (DNS rebinding); so names must be known. An address in
         digits cannot be rebound.
Origin   browsers name the page that sends a request; a page of another site is refused unless it is allowed
API key  if keys are set, a request must have one of them
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.notice import Notice, Setting
from localllm.printable import printable
from localllm.server.accounts import account_of_address
from localllm.server.errors import BadRequest, Forbidden, Unauthorized
from localllm.server.http import CLIENT, refused
from localllm.server.refusal import refusal_of
from localllm.server.settings import Settings, digest

PUBLIC = frozenset({"/", "/health", "/v1/health"})  # answered without a key, as llama-server does
ASSETS = "/web/"  # the folder of the web page's files, which are public too: they are the same everywhere
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:@/\\?#\s]+)(?::\d{1,5})?")


class Guard:
    """Passes on the requests that may be answered, refuses the others, and tells browsers what pages may do."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            await _closed(scope)(scope, receive, send)
            return
        try:
            self._check_host(headers)
            preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            shared = self._shared_with(headers, preflight)
            if not preflight:
                scope[CLIENT] = self._client(scope, headers)
        except (Forbidden, Unauthorized) as error:
            await refused(refusal_of(error), scope["path"])(scope, receive, send)
            return
        if preflight:
            await Response(headers=_preflight(headers, shared))(scope, receive, send)
        else:
            await self.app(scope, receive, _sharing(send, shared) if shared else send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.get("host", "")
        if not given or "*" in self.settings.hosts:  # only HTTP/1.0 has none, which no browser speaks
            return
        name = hostname(given)
        if name not in self.settings.hosts and not is_local(name) and not is_address(name):
            raise Forbidden(
                Notice(
                    f"the host name {printable(given)!r} is not a name of this server; allow it with ",
                    Setting("allowed_host"),
                )
            )

    def _shared_with(self, headers: Headers, preflight: bool) -> str:
        """Return the origin of the page that sends this if another site's page may; "" if there is no such page."""
        origin = headers.get("origin", "")
        if not origin or urlsplit_host(origin) == headers.get("host"):
            return ""
        if _allowed(origin, self.settings.origins):
            return origin
        if preflight:  # the answer lacks the header that would allow it
            return ""
        raise Forbidden(
            Notice(f"pages of {printable(origin)!r} may not use this server; allow them with ", Setting("cors"))
        )

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Return who asks. Unauthorized without a key where one is required."""
        keys = self.settings.keys
        address = scope.get("client")
        if not keys:
            return account_of_address(address[0]) if address else ""
        given = [headers.get("authorization", "").strip(), headers.get("x-api-key", "").strip()]
        for key in given:
            found = digest(key[7:].strip() if key[:7].lower() == "bearer " else key)
            matches = [hmac.compare_digest(found, known) for known in keys]  # all of them: time tells nothing
            if any(matches):
                return f"key {found.hex()[:16]}"
        if scope["path"] in PUBLIC or scope["path"].startswith(ASSETS):
            return account_of_address(address[0]) if address else ""
        missing = "Invalid API Key" if any(given) else "this server requires an API key (Authorization: Bearer KEY)"
        raise Unauthorized(missing)


def _closed(scope: Scope) -> Response:
    """Refuse a request whose end a proxy may find at another place, and close the connection."""
    error = BadRequest("a request may have Content-Length or Transfer-Encoding, not both")
    response = refused(refusal_of(error), scope["path"])
    response.headers["Connection"] = "close"
    return response


def hostname(header: str) -> str:
    """Return the name in a Host header, without its port; "" if it has none."""
    found = _HOST.fullmatch(header.strip().lower())
    return found[1].strip("[]").rstrip(".") if found else ""


def is_address(name: str) -> bool:
    """Whether a host name is an address in digits."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_local(name: str) -> bool:
    """Whether a host name always means this machine."""
    return name in LOCAL or name.endswith(".localhost")


def urlsplit_host(origin: str) -> str:
    """Return host and port of an origin of the web; "" for others, such as null and file://."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return ""
    return found.netloc if found.scheme in ("http", "https") else ""


def _allowed(origin: str, allowed: Collection[str]) -> bool:
    local = "localhost" in allowed and is_local(hostname(urlsplit_host(origin)))
    return "*" in allowed or origin in allowed or local


def _sharing(send: Send, origin: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(raw=message["headers"]).update(_shared(origin))
        await send(message)

    return sending


def _shared(origin: str) -> dict[str, str]:
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true", "Vary": "Origin"}


def _preflight(headers: Headers, origin: str) -> dict[str, str]:
    if not origin:
        return {"Vary": "Origin"}
    found = _shared(origin) | {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        found["Access-Control-Allow-Private-Network"] = "true"
    return found
