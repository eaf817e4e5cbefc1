"""Request bodies with any field content give status 200 or a refusal, never a server error.

The tests change a valid body: they replace, remove or add values at random, with a fixed seed.
"""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import httpx
import pytest

from localllm.server.app import make_app
from localllm.server.settings import ServerSettings
from tests.localllm.server.scripted import ScriptedService

CASES = 250
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3.5, 2**31, 2**64, -(2**64), 10**399, 1e308, "", "x", "\x00", "\U0001f600" * 50),
    *([], {}, [[]], [{}], {"": {}}, ["x"], [1], [None], {"type": "x"}, {"type": "text", "text": 5}, {"role": "user"}),
    *({"type": "function"}, {"type": "function", "function": {"name": "f"}}, [[1, 2]], "none", "required", "a" * 2000),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "stop": ["x"],
        "n": 1,
        "seed": 1,
        "max_tokens": 5,
        "temperature": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
        "samplers": ["top_k"],
        "timings_per_token": True,
        "thinking": {"type": "enabled"},
        "sse_ping_interval": 5,
        "structured_outputs": {},
        "user": "u",
    },
    "/v1/completions": {
        "prompt": ["a", [1, 2], [1, "x"], {"prompt_string": "y"}],
        "echo": True,
        "logprobs": 1,
        "suffix": "s",
        "best_of": 1,
        "n": 1,
        "stream": False,
        "logit_bias": [[5, 1], ["x", False]],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "local_shell_call", "call_id": "d", "action": {}},
            {"type": "local_shell_call_output", "id": "d", "output": "x"},
            {"type": "additional_tools", "tools": [FLAT]},
        ],
        "tools": [
            FLAT,
            {"type": "custom", "name": "c", "format": {"type": "grammar", "definition": "x", "syntax": "lark"}},
            {"type": "namespace", "name": "n", "tools": [FLAT]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "instructions": "i",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["x"],
        "metadata": {"a": "b"},
        "stream": True,
        "max_output_tokens": 5,
    },
    "/v1/embeddings": {
        "input": ["a", [1], {"content": [{"type": "text", "text": "x"}]}],
        "encoding_format": "base64",
        "dimensions": 2,
    },
    "/v1/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "u"},
                    {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "x"}]},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "r"}],
                        "is_error": True,
                    }
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stream": True,
    },
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every location within a JSON value as (container, key or index)."""
    found: list[tuple[Any, Any]] = []
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(value, key), *places(value[key])]
    return found


def changed(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a body with one or two values replaced, removed or duplicated at random."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 2))):
        container, key = chance.choice(places(body))
        match chance.randrange(4):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
            case _:
                container[key] = copy.deepcopy(chance.choice(JUNK))
        if not body:
            break
    return body


@pytest.mark.parametrize("path", BODIES)
def test_the_unchanged_body_is_answered(path: str) -> None:
    assert _run(path, [BODIES[path]]) == [200]


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_an_error_of_the_server(path: str) -> None:
    chance = random.Random(path)
    bodies = [changed(BODIES[path], chance) for _ in range(CASES)]
    for body, status in zip(bodies, _run(path, bodies), strict=True):
        assert status in (200, 400, 413), body


def _run(path: str, bodies: list[dict[str, Any]]) -> list[int]:
    async def run() -> list[int]:
        transport = httpx.ASGITransport(make_app(ScriptedService(), ServerSettings()), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [(await client.post(path, json=body)).status_code for body in bodies]

    return asyncio.run(run())
