"""Limits on open requests, in total and per client; no requests are admitted while the server stops."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from localllm.generation.request import Started
from localllm.options import ServeOptions
from localllm.server import admission as admission_module
from localllm.server.admission import Admission
from localllm.server.app import make_app
from localllm.server.errors import Draining, TooManyRequests
from localllm.server.limits import ServerLimits
from localllm.server.settings import ServerSettings, digest
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService, done, said, script


def test_requests_are_counted() -> None:
    admission = Admission(ServerLimits(requests=3, client_requests=2))
    admission.enter("a")
    admission.enter("a")
    with pytest.raises(TooManyRequests, match="2 requests of yours"):
        admission.enter("a")
    admission.enter("b")
    with pytest.raises(TooManyRequests, match="3 requests are open"):
        admission.enter("c")
    for client in ("a", "a", "b"):
        admission.leave(client, 0.01)
    assert admission.open == 0
    assert not admission.clients  # finished clients leave no entry
    admission.draining = True
    with pytest.raises(Draining):
        admission.enter("a")


def test_no_account_takes_more_than_is_left() -> None:
    admission = Admission(ServerLimits(requests=8, client_requests=100))
    for _ in range(5):
        admission.enter("a")
    with pytest.raises(TooManyRequests, match="5 requests of yours are open"):
        admission.enter("a")
    for _ in range(2):
        admission.enter("b")
    with pytest.raises(TooManyRequests, match="2 requests of yours are open"):
        admission.enter("b")
    admission.enter("c")


def test_the_time_to_retry_follows_from_what_requests_take() -> None:
    admission = Admission(ServerLimits(requests=8, client_requests=2))
    admission.enter("a")
    admission.leave("a", 30.0)
    for expected in (15, 13):  # Retry-After: half of the mean duration, because two requests run at a time
        admission.enter("a")
        admission.enter("a")
        with pytest.raises(TooManyRequests) as raised:
            admission.enter("a")
        assert raised.value.retry_after == expected
        admission.leave("a", 1.0)
        admission.leave("a", 1.0)
    admission.seconds = 1e6
    admission.limits = ServerLimits(client_requests=1)
    admission.enter("a")
    with pytest.raises(TooManyRequests) as raised:
        admission.enter("a")
    assert raised.value.retry_after == 60


def test_tokens_of_a_minute_are_regained_evenly() -> None:
    now = [100.0]
    admission = Admission(ServerLimits(client_tokens=600), clock=lambda: now[0])
    admission.enter("a")
    admission.spend("a", 599)
    admission.enter("a")
    admission.spend("a", 51)
    with pytest.raises(TooManyRequests, match="600 tokens of a minute; try again in 5 seconds") as raised:
        admission.enter("a")
    assert raised.value.retry_after == 5
    admission.enter("b")
    now[0] += 5.1
    admission.enter("a")
    now[0] += 60
    for number in range(admission_module.MOST_CLIENTS + 1):
        admission.spend(f"client {number}", 1)
    assert "a" not in admission.spent


def test_answers_are_counted_for_the_account_of_their_client() -> None:
    settings = ServerSettings(limits=ServerLimits(client_tokens=60), keys=frozenset({digest("one"), digest("two")}))
    service = ScriptedService(script("a", "b", prompt=70, reused=5))

    async def main() -> None:
        app = make_app(service, settings, admission=Admission(settings.limits, clock=lambda: 0.0))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for key, user, expected in (("one", "x", 200), ("one", "y", 429), ("two", "x", 200)):
                body = {"messages": [{"role": "user", "content": "x"}], "user": user}
                response = await client.post("/v1/chat/completions", json=body, headers={"X-Api-Key": key})
                assert response.status_code == expected
                # the client's bucket is 67 - 60 tokens over the limit
                assert response.headers.get("retry-after") == ("7" if expected == 429 else None)

    asyncio.run(main())


def test_each_api_is_refused_in_its_own_shape() -> None:
    admission = Admission(ServerLimits(client_requests=1))
    admission.enter("127.0.0.1")
    app = make_app(ScriptedService(script("a")), ServerSettings(limits=admission.limits), admission=admission)
    response = call(app, "/v1/messages", {})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    message = "1 requests of yours are open, which is the limit; wait for one to end"
    assert response.json() == {"type": "error", "error": {"type": "rate_limit_error", "message": message}}


async def together(
    settings: ServerSettings, admission: Admission, headers: list[dict[str, str]]
) -> list[httpx.Response]:
    """Send slow requests concurrently, then check that /health still answers."""
    service = ScriptedService([Started(5, 0), *said("a"), 0.05, done()])
    app = make_app(service, settings, admission=admission)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        bodies: Any = [client.post("/completion", json={"prompt": "x"}, headers=each) for each in headers]
        found = await asyncio.gather(*bodies)
        assert (await client.get("/health")).status_code == 200
        return found


def test_too_many_are_refused_and_the_others_answered() -> None:
    settings = ServerSettings(limits=ServerLimits(requests=2))
    admission = Admission(settings.limits)
    found = asyncio.run(together(settings, admission, [{}] * 5))
    assert sorted(each.status_code for each in found) == [200, 200, 429, 429, 429]
    refused = next(each for each in found if each.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert admission.open == 0


def test_clients_with_keys_have_limits_of_their_own() -> None:
    keys = frozenset({digest("one"), digest("two")})
    settings = ServerSettings(limits=ServerLimits(client_requests=1), keys=keys)
    headers = [{"X-Api-Key": "one"}, {"X-Api-Key": "two"}, {"X-Api-Key": "one"}]
    found = asyncio.run(together(settings, Admission(settings.limits), headers))
    assert [each.status_code for each in found] == [200, 200, 429]


@pytest.mark.parametrize(("allowed", "priority"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_priority_is_the_operators(path: str, allowed: bool, priority: int) -> None:
    settings = ServerSettings.of(ServeOptions(allow_priority=allowed))
    service = ScriptedService(script("a"))
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {field: [{"role": "user", "content": "x"}] if field == "messages" else "x", "max_tokens": 2}
    answer = call(service, path, {**body, "service_tier": "priority"}, settings=settings)
    assert answer.status_code == 200
    assert service.asked[-1].generation.priority == priority


def test_a_stopping_server_answers_only_questions() -> None:
    settings = ServerSettings()
    admission = Admission(settings.limits, draining=True)

    async def main() -> None:
        app = make_app(ScriptedService(script("a")), settings, admission=admission)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            response = await client.post("/completion", json={"prompt": "x"})
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert (await client.get("/slots")).status_code == 200

    asyncio.run(main())
