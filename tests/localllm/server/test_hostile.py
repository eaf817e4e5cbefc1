"""Hostile requests to every route get an answer or an error in the format of the API, never status 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.server.app import make_app
from localllm.server.errors import Refusal
from localllm.server.limits import ServerLimits
from localllm.server.settings import ServerSettings
from localllm.server.shapes import shape_of
from tests.localllm.server.scripted import ScriptedService, script

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SAMPLING = {
    "n_predict": 4, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["a"], "samplers": ["top_k"], "grammar": "g",
    "json_schema": {"type": "object"}, "logit_bias": [[5, 1.0]], "n_probs": 1, "n_cmpl": 1, "id_slot": 0,
    "cache_prompt": True, "response_fields": ["a/b"], "lora": [{"id": 0, "scale": 0}], "n_indent": 1, "stream": True,
    "dry_sequence_breakers": ["a"], "t_max_predict_ms": 5, "sse_ping_interval": 1, "mirostat": 0, "repeat_last_n": 1,
    "return_progress": True, "timings_per_token": True, "return_tokens": True, "ignore_eos": True, "model": "tiny",
}  # fmt: skip
MESSAGES = [
    {"role": "user", "content": "x", "images": []},
    {"role": "assistant", "content": "x", "thinking": "x", "tool_calls": [{"id": "a", "function": {
        "name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "x", "tool_name": "f", "tool_call_id": "a"},
]  # fmt: skip
OLLAMA = {
    "model": "tiny", "stream": False, "format": {"type": "object"}, "keep_alive": "5m", "think": True, "logprobs": True,
    "top_logprobs": 2, "options": {"temperature": 0.5, "top_k": 2, "stop": ["a"], "num_predict": 3, "mirostat": 0},
}  # fmt: skip
CHAT = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "user", "content": "u", "name": "n"},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "t"},
]  # fmt: skip
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
GRAMMAR = {"type": "grammar", "definition": "x", "syntax": "lark"}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"text": "t"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
    {"type": "local_shell_call", "call_id": "d", "action": {}},
    {"type": "local_shell_call_output", "id": "d", "output": "x"},
    {"type": "additional_tools", "tools": [FLAT]},
]
BLOCKS = [
    {"role": "user", "content": [
        {"type": "text", "text": "u"},
        {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "x"}]}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}], "is_error": True}]},
]  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": ["x", [1, "a"], {"prompt_string": "a"}], **SAMPLING},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "prompt": "c",
                "input_extra": [{"filename": "a", "text": "b"}]},
    "/tokenize": {"content": ["a", 5], "add_special": True, "parse_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [TOOL],
                        "tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True},
    "/embedding": {"input": ["a", {"content": [{"type": "text", "text": "a"}]}], "embd_normalize": 2,
                   "encoding_format": "float"},
    "/rerank": {"query": "a", "documents": ["a", "b"], "top_n": 1, "texts": ["a"], "return_text": True,
                "model": "tiny"},
    "/api/chat": {"messages": MESSAGES, "tools": [TOOL], **OLLAMA},
    "/api/generate": {"prompt": "a", "suffix": "", "system": "s", "raw": False, "context": [1], "images": [],
                      "template": "", **OLLAMA},
    "/api/embed": {"input": ["a"], "truncate": True, "dimensions": 2, "options": {}, "keep_alive": 5},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {"model": "tiny", "name": "x", "verbose": True},
    "/api/pull": {"model": "tiny", "stream": True},
    "/v1/chat/completions": {
        "model": "m", "messages": CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "stop": ["x"], "n": 1, "seed": 1, "max_tokens": 5,
        "temperature": 1, "stream": True, "stream_options": {"include_usage": True}, "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True}, "samplers": ["top_k"], "timings_per_token": True,
        "thinking": {"type": "enabled"}, "sse_ping_interval": 5, "structured_outputs": {}, "user": "u"},
    "/v1/completions": {"prompt": ["a", [1, 2], [1, "x"], {"prompt_string": "y"}], "echo": True, "logprobs": 1,
                        "suffix": "s", "best_of": 1, "n": 1, "stream": False, "logit_bias": [[5, 1], ["x", False]]},
    "/v1/responses": {
        "input": ITEMS, "tools": [FLAT, {"type": "custom", "name": "c", "format": GRAMMAR},
                                  {"type": "namespace", "name": "n", "tools": [FLAT]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "instructions": "i", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": ["x"],
        "metadata": {"a": "b"}, "stream": True, "max_output_tokens": 5},
    "/v1/embeddings": {"input": ["a", [1], {"content": [{"type": "text", "text": "x"}]}], "encoding_format": "base64",
                       "dimensions": 2},
    "/v1/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    "/v1/messages": {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s", "cache_control": {}}],
        "messages": BLOCKS, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "stream": True,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
}  # fmt: skip
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1.5, 5.0, 1e308, -1e308, 10**300, -(10**300), 2**31, 2**63, "", "x", "\x00",
    "é\u2028\U0010ffff", "\u202e" * 50, "%s{}{{", "x" * 70_000, [], [None], [[]], [{}], [[[[]]]], [True],
    ["x", 5, {}], {}, {"a": {}}, {"": ""}, {"type": "x"}, [0] * 1000, ["x"] * 1000,
    [[5, 1e308]], {"5": 1e308}, {"prompt_string": {}},
]  # fmt: skip
RAW: list[bytes] = [
    b"", b" ", b"\x00", b"{", b"}", b"[]", b"null", b"5", b'"x"', b"{}", b"{}{}", b"[" * 100_000, b'{"a":' * 100_000,
    b'{"prompt":' + b"[" * 90 + b"]" * 90 + b"}", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'{"prompt": 1e999}', b'{"prompt": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "x"} trailing', b"prompt=x", b"--boundary\r\n\r\nx", b"x" * 300_000,
    b'{"messages": [' + b'{"role":"user","content":"x"},' * 3000 + b'{"role":"user","content":"x"}]}',
    b'{"prompt": [' + b"1," * 150_000 + b"1]}", b'{"\\u0000": 1}', b'{"__proto__": {}, "constructor": 1}',
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every replaceable value in a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def judge(path: str, response: httpx.Response) -> None:
    """Check that the response is an answer, or an error in the format of the requested API."""
    status = response.status_code
    assert status in (200, 400, 404, 413, 501), (path, status, response.text[:300])
    if status != 200:
        found, expected = response.json(), shape_of(path).body
        assert found.keys() == expected(Refusal(400, "invalid_request", "x")).keys()
        message = found["error"] if path.startswith("/api/") else found["error"]["message"]
        assert message
        assert len(message) < 2500
        assert "\n" not in message
        assert "Traceback" not in message
    else:
        assert "internal error" not in response.text


def send_all(bodies: list[tuple[str, bytes]]) -> None:
    limits = ServerLimits(body_bytes=500_000, items=100_000)

    async def main() -> None:
        app = make_app(ScriptedService(script("a", "b")), ServerSettings(limits=limits))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for path, body in bodies:
                judge(path, await client.post(path, content=body))

    asyncio.run(main())


@pytest.mark.parametrize("path", VALID)
def test_the_requests_that_are_changed_are_good(path: str) -> None:
    async def main() -> int:
        app = make_app(ScriptedService(script("a")), ServerSettings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.post(path, content=json.dumps(VALID[path]))).status_code

    assert asyncio.run(main()) == 200


@pytest.mark.parametrize("path", VALID)
def test_every_field_with_every_hostile_value(path: str) -> None:
    valid = VALID[path]
    bodies = [json.dumps(changed(valid, place, new)).encode() for place in places(valid) for new in HOSTILE]
    send_all([(path, body) for body in bodies])


@pytest.mark.parametrize("path", VALID)
def test_bodies_that_are_no_requests(path: str) -> None:
    send_all([(path, body) for body in RAW])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({name for body in VALID.values() for name in body})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(VALID)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_fields(path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(VALID[path] | fields).encode("utf-8", "surrogatepass")
    send_all([(path, body)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=200))
def test_any_bytes(path: str, body: bytes) -> None:
    send_all([(path, body), (path, b'{"prompt": "' + body + b'"}')])


@pytest.mark.parametrize(
    "path", ["/health", "/props", "/slots", "/metrics", "/", "/api/tags", "/api/ps", "/api/version"]
)
@pytest.mark.parametrize("query", ["", "?", "?model=%00", "?model=a&model=b", "?fail_on_no_slot=%ff", "?" + "a" * 5000])
def test_questions_with_any_query(path: str, query: str) -> None:
    async def main() -> None:
        app = make_app(ScriptedService(), ServerSettings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.get(path + query)).status_code == 200

    asyncio.run(main())
