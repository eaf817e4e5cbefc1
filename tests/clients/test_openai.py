"""The `openai` package: its chat and responses clients with tools, reasoning and schemas, with and without
streaming.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

openai = pytest.importorskip("openai", reason="the openai package is not installed")
pydantic = pytest.importorskip("pydantic", reason="the openai package is not installed")

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SUM = plan(
    calls(Call("add", {"a": 2, "b": 3}), Call("add", {"a": 20, "b": 30}), text="Let me see.", thought="Two sums."),
    calls(Call("add", {"a": 5, "b": 50})),
    says("It is {result}, after {seen} messages."),
)
ANSWER = "It is 55, after 5 messages."  # two answers and three results precede it


class City(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    name: Literal["Rome", "Oslo"]
    people: int


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as it:
        yield it


def run(call: Any) -> str:
    assert call.function.name == "add"
    return str(sum(json.loads(call.function.arguments).values()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(client: Any, stream: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": "You add."}, {"role": "user", "content": SUM}]
    finishes, thoughts = [], []
    while True:
        choice = (streamed if stream else whole)(client, messages)
        finishes.append(choice.finish_reason)
        thoughts.append(getattr(choice.message, "reasoning_content", None))
        made = choice.message.tool_calls
        if not made:
            break
        messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": made})
        messages += [{"role": "tool", "tool_call_id": each.id, "content": run(each)} for each in made]
        assert len({each.id for each in made}) == len(made)
    assert choice.message.content == ANSWER
    assert finishes == ["tool_calls", "tool_calls", "stop"]
    assert (thoughts[0] or "").strip() == "Two sums."
    assert messages[2]["content"].strip() == "Let me see."


def whole(client: Any, messages: list[Any]) -> Any:
    body = client.chat.completions.create(model="planned", messages=messages, tools=[ADD])
    assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
    return body.choices[0]


def streamed(client: Any, messages: list[Any]) -> Any:
    with client.chat.completions.stream(model="planned", messages=messages, tools=[ADD]) as events:
        for event in events:
            if event.type == "tool_calls.function.arguments.done":
                assert json.loads(event.arguments)
    return events.get_final_completion().choices[0]


def test_a_later_turn_finds_the_first_in_the_cache(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": plan(says("First."), says("Second, after {seen}."))}]
    client.chat.completions.create(model="planned", messages=messages)
    messages += [{"role": "assistant", "content": "First."}, {"role": "user", "content": "Go on."}]
    body = client.chat.completions.create(model="planned", messages=messages)
    assert body.choices[0].message.content == "Second, after 1."
    assert body.usage.prompt_tokens_details.cached_tokens > 0.7 * body.usage.prompt_tokens


def test_a_forced_call(client: Any) -> None:
    """The grammar of a forced call accepts the planned tokens and no others."""
    message = {"role": "user", "content": plan(calls(Call("add", {"a": 1, "b": 2})))}
    chosen: Any = {"type": "function", "function": {"name": "add"}}
    body = client.chat.completions.create(model="planned", messages=[message], tools=[ADD], tool_choice=chosen)
    assert json.loads(body.choices[0].message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    assert body.choices[0].finish_reason in ("tool_calls", "stop")


def test_a_schema(client: Any) -> None:
    message: Any = {"role": "user", "content": plan(says('{"name": "Rome", "people": 2800000}'))}
    body = client.chat.completions.parse(model="planned", messages=[message], response_format=City)
    assert body.choices[0].message.parsed == City(name="Rome", people=2_800_000)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_with_tools(client: Any, stream: bool) -> None:
    tool: Any = {"type": "function", **ADD["function"], "strict": False}
    items: list[Any] = [{"role": "user", "content": SUM}]
    turns = 0
    while True:
        asked = {"model": "planned", "input": items, "tools": [tool], "instructions": "You add.", "store": False}
        if stream:
            with client.responses.stream(**asked) as events:
                kinds = [event.type for event in events]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            body = events.get_final_response()
        else:
            body = client.responses.create(**asked)
        turns += 1
        made = [item for item in body.output if item.type == "function_call"]
        if not made:
            break
        items += body.output
        for each in made:
            total = str(sum(json.loads(each.arguments).values()))
            items.append({"type": "function_call_output", "call_id": each.call_id, "output": total})
    assert body.output_text == ANSWER
    assert turns == 3


def test_what_is_not_supported_is_not_tried_again(server: Server) -> None:
    sent: list[Any] = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        client._client.event_hooks["request"].append(sent.append)
        with pytest.raises(openai.APIStatusError, match="ranking"):
            client.post("/rerank", body={"query": "a", "documents": ["b"]}, cast_to=object)
    assert len(sent) == 1


def test_errors(client: Any) -> None:
    wrong: Any = {**ADD, "function": {**ADD["function"], "parameters": "none"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "Hi"}], tools=[wrong])
    assert "parameters" in caught.value.param
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "word " * 20_000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
