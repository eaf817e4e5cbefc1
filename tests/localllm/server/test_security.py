"""Access control: host names, page origins, and API keys."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from localllm.options import ServeOptions
from localllm.server.accounts import account_of_address
from localllm.server.app import make_app
from localllm.server.security import hostname, is_address, is_local
from localllm.server.settings import ServerSettings, digest
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService

KEY = "sk-this-is-the-secret-key"


def status(headers: dict[str, str], path: str = "/props", method: str = "GET", **options: Any) -> int:
    settings = ServerSettings.of(ServeOptions(**options))
    return call(ScriptedService(), path, method=method, headers=headers, settings=settings).status_code


# -- host ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8080", "localhost"),
        ("localhost.", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::1]:8080", "::1"),
        ("::1", ""),
        ("a:b", ""),
        ("a:80:90", ""),
        ("user@localhost", ""),
        ("localhost/x", ""),
        ("[localhost]", ""),
        ("", ""),
    ],
)
def test_hostname(header: str, name: str) -> None:
    assert hostname(header) == name


def test_kinds_of_names() -> None:
    assert is_address("10.0.0.1")
    assert is_address("::1")
    assert not is_address("10.0.0.1.evil.com")
    assert not is_address("0x7f.1")
    assert is_local("app.localhost")
    assert not is_local("localhost.evil.com")
    assert not is_local("notlocalhost")


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "192.168.1.7:8080"])
def test_names_of_this_machine_and_addresses_may(host: str) -> None:
    assert status({"Host": host}) == 200


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8080", "localhost.evil.com", "127.0.0.1.evil.com", "a b", "::1"]
)
def test_other_names_may_not(host: str) -> None:
    assert status({"Host": host}) == 403


def test_names_can_be_allowed() -> None:
    assert status({"Host": "Box.lan:8080"}, allowed_host=("box.LAN",)) == 200
    assert status({"Host": "other.lan"}, allowed_host=("box.lan",)) == 403
    assert status({"Host": "other.lan"}, allowed_host=("*",)) == 200
    assert status({"Host": "box.lan:80"}, host="127.0.0.1,box.lan") == 200


def test_health_is_no_exception() -> None:
    assert status({"Host": "evil.com"}, "/health") == 403


# -- origin ----------------------------------------------------------------------------------------------------------

FOREIGN = [
    "http://evil.com",
    "https://localhost:8080",
    "http://localhost:3000",
    "null",
    "file://",
    "http://[",
    "evil.com",
]


@pytest.mark.parametrize("origin", FOREIGN[:1] + FOREIGN[2:])
def test_pages_of_other_sites_may_not(origin: str) -> None:
    response = call(ScriptedService(), "/completion", {"prompt": "x"}, headers={"Origin": origin})
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


def test_pages_of_this_server_may() -> None:
    assert status({"Host": "localhost:8080", "Origin": "http://localhost:8080"}) == 200
    assert status({"Host": "localhost:8080", "Origin": "http://localhost:8081"}) == 403
    assert status({"Host": "evil.com", "Origin": "http://evil.com"}) == 403  # DNS rebinding


def test_pages_can_be_allowed() -> None:
    page = {"Origin": "https://chat.example.org"}
    response = call(
        ScriptedService(),
        "/props",
        headers=page,
        settings=ServerSettings.of(ServeOptions(cors=("https://chat.example.org/",))),
    )
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert response.headers["vary"] == "Origin"
    assert status({"Origin": "https://other.org"}, cors=("https://chat.example.org",)) == 403
    assert status({"Origin": "https://other.org"}, cors=("*",)) == 200
    assert status({"Origin": "http://localhost:3000"}, cors=("localhost",)) == 200
    assert status({"Origin": "http://localhost.evil.com"}, cors=("localhost",)) == 403


def test_errors_are_shared_with_allowed_pages_too() -> None:
    settings = ServerSettings.of(ServeOptions(cors=("*",)))
    response = call(ScriptedService(), "/completion", {}, headers={"Origin": "http://a.b"}, settings=settings)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (400, "http://a.b")


def preflight(origin: str, **options: Any) -> Any:
    return call(
        ScriptedService(),
        "/completion",
        method="OPTIONS",
        settings=ServerSettings.of(ServeOptions(**options)),
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
            "Access-Control-Request-Private-Network": "true",
        },
    )


def test_preflights_need_no_key_and_name_what_is_allowed() -> None:
    response = preflight("http://web.mydomain.fr", cors=("*",), api_key=(KEY,))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://web.mydomain.fr"
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"
    assert response.headers["access-control-allow-private-network"] == "true"


def test_preflights_of_other_pages_allow_nothing() -> None:
    for options in ({}, {"cors": ("localhost",)}):
        response = preflight("http://evil.com", **options)
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control-")]


# -- API keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {KEY}"},
        {"Authorization": KEY},
        {"X-Api-Key": KEY},
        {"Authorization": "Bearer wrong", "X-Api-Key": KEY},
    ],
)
def test_a_key_opens(headers: dict[str, str]) -> None:
    assert status(headers, api_key=("other", KEY)) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"X-Api-Key": "é"},
        {"Cookie": KEY},
    ],
)
def test_nothing_else_does(headers: dict[str, str]) -> None:
    assert status(headers, api_key=(KEY,)) == 401
    assert status(headers, "/v1/models", api_key=(KEY,)) == 401  # llama-server requires a key here too
    assert status(headers, "/nowhere", api_key=(KEY,)) == 401


def test_health_is_public() -> None:
    for path in ("/health", "/v1/health", "/"):
        assert status({}, path, api_key=(KEY,)) == 200
        assert status({"Authorization": "Bearer wrong"}, path, api_key=(KEY,)) == 200


def test_refusals_have_the_protocols_shape() -> None:
    settings = ServerSettings(keys=frozenset({digest(KEY)}))
    response = call(ScriptedService(), "/v1/messages", {}, settings=settings)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("address", "account"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::"),
        ("2001:db8:1:2::", "2001:db8:1:2::"),
        ("2001:db8:1:3::1", "2001:db8:1:3::"),
        ("::1", "::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_an_address_of_a_site_stands_for_all_that_a_host_there_may_use(address: str, account: str) -> None:
    assert account_of_address(address) == account
    service = ScriptedService()

    async def main() -> None:
        transport = httpx.ASGITransport(make_app(service, ServerSettings()), client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/completion", json={"prompt": "x"})

    asyncio.run(main())
    assert service.asked[0].generation.client == account


def test_two_ends_of_a_body_are_refused_and_the_connection_closed() -> None:
    for path, shape in (("/completion", "error"), ("/v1/messages", "error"), ("/health", "error")):
        headers = {"Content-Length": "2", "Transfer-Encoding": "chunked"}
        response = call(ScriptedService(), path, b"{}", headers=headers)
        assert response.status_code == 400
        assert "Content-Length or Transfer-Encoding" in response.text
        assert shape in response.json()
        assert response.headers["connection"] == "close"


def test_who_asks_is_known_by_key_or_address() -> None:
    service = ScriptedService()
    call(service, "/completion", {"prompt": "x"})
    call(
        service,
        "/completion",
        {"prompt": "x"},
        headers={"X-Api-Key": KEY},
        settings=ServerSettings(keys=frozenset({digest(KEY)})),
    )
    clients = [asked.generation.client for asked in service.asked]
    assert clients[0] == "127.0.0.1"
    assert clients[1].startswith("key ")
    assert KEY not in clients[1]
