"""The `anthropic` package: messages with tools and thinking, and the package's tool runner, with and without
streaming.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

ADD: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
SUM = plan(
    calls(Call("add", {"a": 2, "b": 3}), Call("add", {"a": 20, "b": 30}), text="Let me see.", thought="Two sums."),
    calls(Call("add", {"a": 5, "b": 50})),
    says("It is {result}, after {seen} messages."),
)
ANSWER = "It is 55, after 5 messages."


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as it:
        yield it


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(client: Any, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": SUM}]
    reasons = []
    while True:
        asked: dict[str, Any] = {
            "model": "claude-any", "max_tokens": 1000, "system": "You add.", "messages": messages, "tools": [ADD],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }  # fmt: skip
        if stream:
            with client.messages.stream(**asked) as events:
                texts = "".join(events.text_stream)
            body = events.get_final_message()
            assert texts == "".join(block.text for block in body.content if block.type == "text")
        else:
            body = client.messages.create(**asked)
        reasons.append(body.stop_reason)
        made = [block for block in body.content if block.type == "tool_use"]
        if not made:
            break
        messages.append({"role": "assistant", "content": body.content})
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": _add(each)} for each in made]
        messages.append({"role": "user", "content": results})
    assert body.content[-1].text == ANSWER
    assert reasons == ["tool_use", "tool_use", "end_turn"]
    first = messages[1]["content"]
    assert [block.type for block in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert first[0].thinking.strip() == "Two sums."


def _add(call: Any) -> str:
    assert call.name == "add"
    return str(sum(call.input.values()))


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(client: Any, stream: bool) -> None:
    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model="claude-any", max_tokens=1000, tools=[add], messages=[{"role": "user", "content": SUM}], stream=stream
    )
    last = None
    for each in runner:
        last = each.get_final_message() if stream else each
    assert last is not None
    assert last.content[-1].text == ANSWER


def test_tokens_are_counted_and_reused(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": plan(says("Yes, after {seen}."), says("Again, after {seen}."))}]
    asked: dict[str, Any] = {"model": "claude-any", "system": "You are brief."}
    counted = client.messages.count_tokens(messages=messages, tools=[ADD], **asked).input_tokens
    body = client.messages.create(messages=messages, tools=[ADD], max_tokens=100, **asked)
    assert body.usage.input_tokens + (body.usage.cache_read_input_tokens or 0) == counted
    messages += [{"role": "assistant", "content": body.content}, {"role": "user", "content": "Once more."}]
    body = client.messages.create(messages=messages, tools=[ADD], max_tokens=100, **asked)
    assert body.content[0].text == "Again, after 1."
    assert body.usage.cache_read_input_tokens >= 0.9 * counted


def test_errors(client: Any) -> None:
    asked: dict[str, Any] = {"model": "claude-any", "max_tokens": 10}
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(messages=[], **asked)
    wrong: Any = {"name": "add", "input_schema": "none"}
    with pytest.raises(anthropic.BadRequestError, match="input_schema") as caught:
        client.messages.create(messages=[{"role": "user", "content": "Hi"}], tools=[wrong], **asked)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
