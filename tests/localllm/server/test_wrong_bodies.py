"""Invalid bodies, and the line with which each is refused.

`wrong_bodies.txt` has the valid body of an endpoint, and below it changes of its fields, each with the status and the
message of the error:

    POST /v1/completions {"prompt": "x"}
    {"prompt": 5} -> 400 prompt: expected a text or a list of token ids

After an intended change, write the file again and read the difference:

    python -m tests.localllm.server.test_wrong_bodies
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService

TOO_MUCH: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/completions", {"prompt": ["a"] * 2049}, "prompt: expected 1 to 2048 items, got 2049"),
    ("/v1/completions", {"top_k": 10**399}, f"top_k: expected at most 2147483647, got 1{'0' * 39}..."),
    ("/v1/completions", {"stop": ["x" * 1001]}, "stop[0]: a text has 1001 characters; the limit is 1000"),
    ("/v1/completions", {"stop": ["x"] * 129}, "stop: has 129 items; the limit is 128"),
    ("/v1/completions", {"guided_choice": ["("] * 1001}, "guided_choice: has 1001 items; the limit is 1000"),
    (
        "/v1/completions",
        {"guided_choice": ["(" * 1_000_001]},
        "guided_choice: the texts have more than 1000000 characters together",
    ),
    ("/completion", {"prompt": ["a"] * 2000}, "prompt has 2000 prompts; the limit is 1024"),
    ("/completion", {"logit_bias": [[97, 1]] * 10_001}, "logit_bias: has 10001 entries; the limit is 10000"),
    ("/completion", {"stop": ["x"] * 1000}, "stop: has 1000 items; the limit is 256"),
)
FILE = Path(__file__).with_name("wrong_bodies.txt")


class Endpoint(NamedTuple):
    """An endpoint, a valid body, and the lines of its invalid changes."""

    path: str
    body: dict[str, Any]
    lines: list[str]

    def refused(self) -> list[str]:
        """Return the lines with the present messages."""
        changes = [line.rpartition(" -> ")[0] for line in self.lines]
        return [f"{change} -> {refusal(self.path, self.body | json.loads(change))}" for change in changes]

    def __str__(self) -> str:
        return "\n".join([f"POST {self.path} {json.dumps(self.body)}", *self.refused(), ""])


def refusal(path: str, body: dict[str, Any]) -> str:
    """Return the status and message of an error, and OpenAI's `param` if the message does not start with it."""
    service = ScriptedService()
    response = call(service, path, body)
    assert not service.asked, "the body is valid"
    error = response.json()["error"]
    message, param = (error, None) if isinstance(error, str) else (error["message"], error.get("param"))
    assert "\n" not in message
    return f"{response.status_code} {message}" + ("" if message.startswith(param or "") else f" ({param})")


def endpoints() -> list[Endpoint]:
    """Return the endpoints in the file."""
    found = []
    for block in FILE.read_text(encoding="utf-8").rstrip("\n").split("\n\n"):
        first, *lines = block.split("\n")
        _, path, body = first.split(" ", 2)
        found.append(Endpoint(path, json.loads(body), lines))
    return found


@pytest.mark.parametrize("endpoint", endpoints(), ids=lambda each: each.path)
def test_each_wrong_body_is_refused_in_one_line(endpoint: Endpoint) -> None:
    assert call(ScriptedService(), endpoint.path, endpoint.body).status_code == 200
    assert endpoint.refused() == endpoint.lines


@pytest.mark.parametrize(("path", "change", "message"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_a_body_with_too_much_is_refused(path: str, change: dict[str, Any], message: str) -> None:
    assert refusal(path, {"prompt": "x"} | change) == f"400 {message}"


if __name__ == "__main__":
    FILE.write_text("\n".join(map(str, endpoints())), encoding="utf-8")
