"""Helpers that send requests to /completion and return the response or the service's request."""

from __future__ import annotations

from typing import Any

from localllm.server.turn import Completion
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService, script


def complete(steps: Any = None, path: str = "/completion", **body: Any) -> Any:
    service = ScriptedService(script("Hello", " world") if steps is None else steps)
    response = call(service, path, {"prompt": "x"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def asked(**body: Any) -> Completion:
    """Return the `Completion` that the service gets for a request body."""
    service = ScriptedService(script("a"))
    response = call(service, "/completion", {"prompt": "x"} | body)
    assert response.status_code == 200, response.text
    found = service.asked[-1]
    assert isinstance(found, Completion)
    return found
