"""Send requests to the application with a scripted service, and parse its event streams."""

from __future__ import annotations

import json
from typing import Any

import httpx

from localllm.server.structs import B, read
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService

USER = [{"role": "user", "content": "Hi"}]


def send(service: ScriptedService, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
    """Send one request to the application."""
    return call(service, path, body if method == "POST" else None, method=method)


def ok(service: ScriptedService, path: str, **body: Any) -> dict[str, Any]:
    """Send a request, check for status 200, and return the JSON object."""
    response = send(service, path, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def stream(service: ScriptedService, path: str, **body: Any) -> list[tuple[str, Any]]:
    """Return (event name, data) of each server-sent event. The event name may be "", and the data "[DONE]"
    stays a string.
    """
    response = send(service, path, {"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.text)


def parse_events(text: str) -> list[tuple[str, Any]]:
    """Parse server-sent events as the HTML standard defines them."""
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n") if line and not line.startswith(":")]
        data = "\n".join(value for name, _, value in lines if name == "data")
        if data:
            name = next((value for name, _, value in lines if name == "event"), "")
            found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


def chunks(service: ScriptedService, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream, after checking that it ends with [DONE]."""
    events = stream(service, path, **body)
    assert events[-1] == ("", "[DONE]")
    assert {name for name, _ in events} == {""}
    return [data for _, data in events[:-1]]


def refusal(service: ScriptedService, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Return status and error of a request, after checking that it never reached the service."""
    response = send(service, path, body)
    assert response.status_code >= 400, response.text
    assert service.asked == []
    return response.status_code, response.json()["error"]


def fields(kind: type[B], **body: Any) -> B:
    """Return a body as the struct that a handler gets."""
    return read(body, kind)
