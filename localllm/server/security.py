"""Access checks before a request is read.

Host     only known names and numeric addresses are accepted, because a web page can point its own host name at this
         machine (DNS rebinding).
Origin   browsers send the origin of a page; pages of other sites are refused unless they are allowed
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

from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.server.accounts import account_of_address
from localllm.server.errors import BadRequest, Forbidden, Unauthorized, refusal_of
from localllm.server.http import CLIENT, refused
from localllm.server.settings import ServerSettings, digest

PUBLIC = frozenset({"/", "/health", "/v1/health"})  # no key required, as in llama-server
ASSETS = "/web/"  # static files of the web page, which are also public
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:@/\\?#\s]+)(?::\d{1,5})?")


class Guard:
    """Passes on allowed requests, refuses other requests, and sends browsers the headers that restrict pages."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
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
        if not given or "*" in self.settings.hosts:  # only HTTP/1.0 lacks Host, and no browser uses it
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
        """Return the origin of an allowed page on another site, or "" for a request that is not cross-origin."""
        origin = headers.get("origin", "")
        if not origin or urlsplit_host(origin) == headers.get("host"):
            return ""
        if _allowed(origin, self.settings.origins):
            return origin
        if preflight:  # without the allow header, the browser refuses
            return ""
        raise Forbidden(
            Notice(f"pages of {printable(origin)!r} may not use this server; allow them with ", Setting("cors"))
        )

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Return the client of a request; raise Unauthorized if a required key is missing or wrong."""
        keys = self.settings.keys
        address = scope.get("client")
        if not keys:
            return account_of_address(address[0]) if address else ""
        given = [headers.get("authorization", "").strip(), headers.get("x-api-key", "").strip()]
        for key in given:
            found = digest(key[7:].strip() if key[:7].lower() == "bearer " else key)
            matches = [hmac.compare_digest(found, known) for known in keys]  # compare with all keys, in constant time
            if any(matches):
                return f"key {found.hex()[:16]}"
        if scope["path"] in PUBLIC or scope["path"].startswith(ASSETS):
            return account_of_address(address[0]) if address else ""
        missing = "Invalid API Key" if any(given) else "this server requires an API key (Authorization: Bearer KEY)"
        raise Unauthorized(missing)


def _closed(scope: Scope) -> Response:
    """Refuse a request with ambiguous framing (request smuggling), and close the connection."""
    error = BadRequest("a request may have Content-Length or Transfer-Encoding, not both")
    response = refused(refusal_of(error), scope["path"])
    response.headers["Connection"] = "close"
    return response


def hostname(header: str) -> str:
    """Return the host name in a Host header without the port, or "" if it is empty."""
    found = _HOST.fullmatch(header.strip().lower())
    return found[1].strip("[]").rstrip(".") if found else ""


def is_address(name: str) -> bool:
    """Return whether a host name is a numeric address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_local(name: str) -> bool:
    """Return whether a host name always refers to this machine."""
    return name in LOCAL or name.endswith(".localhost")


def urlsplit_host(origin: str) -> str:
    """Return the host and port of an http(s) origin, or "" for other origins such as null and file://."""
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
