"""The `openai-agents` package: agents with tools over both OpenAI APIs, with and without streaming, and a handoff."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from tests.clients.conftest import Server
from tests.clients.plans import Call, calls, plan, says

agents = pytest.importorskip("agents", reason="the openai-agents package is not installed")
openai = pytest.importorskip("openai", reason="the openai-agents package is not installed")

T = TypeVar("T")
ROUTES = ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"]


def use(server: Server, route: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run `work` with a model of the server."""

    async def run() -> T:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await work(getattr(agents, route)(model="planned", openai_client=client))

    return asyncio.run(run())


def tools(ran: list[str]) -> list[Any]:
    """Return two tools that record their calls."""

    @agents.function_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        ran.append(city)
        return f"{city}: 21 degrees"

    @agents.function_tool  # type: ignore[untyped-decorator]
    async def convert(degrees: float, to: str = "F") -> str:
        """Convert degrees Celsius."""
        ran.append(to)
        return f"{degrees * 9 / 5 + 32:.1f} {to}"

    return [weather, convert]


STEPS = plan(
    calls(Call("weather", {"city": "Rome"}), Call("weather", {"city": "Oslo"}), text="I look."),
    calls(Call("convert", {"degrees": 21, "to": "F"})),
    says("That is {result}, after {seen}."),
)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools(server: Server, route: str, stream: bool) -> None:
    ran: list[str] = []

    async def work(model: Any) -> tuple[Any, list[str]]:
        settings = agents.ModelSettings(include_usage=True)
        agent = agents.Agent(
            name="Weather", instructions="Use the tools.", model=model, tools=tools(ran), model_settings=settings
        )
        if not stream:
            return await agents.Runner.run(agent, STEPS), []
        result = agents.Runner.run_streamed(agent, STEPS)
        kinds = [event.type async for event in result.stream_events()]
        return result, kinds

    result, kinds = use(server, route, work)
    assert result.final_output == "That is 69.8 F, after 5."
    assert ran == ["Rome", "Oslo", "F"]
    assert not stream or {"raw_response_event", "run_item_stream_event"} <= set(kinds)
    used = result.context_wrapper.usage
    assert used.requests == 3
    assert used.input_tokens > 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_second_run_continues_the_first(server: Server, route: str) -> None:
    async def work(model: Any) -> Any:
        agent = agents.Agent(name="Weather", model=model, tools=tools([]))
        steps = plan(calls(Call("weather", {"city": "Rome"})), says("Warm."), says("{seen}"))
        first = await agents.Runner.run(agent, steps)
        return await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])

    assert use(server, route, work).final_output == "3"  # two answers and one tool result precede it


@pytest.mark.parametrize("route", ROUTES)
def test_a_handoff_and_a_typed_answer(server: Server, route: str) -> None:
    pydantic = pytest.importorskip("pydantic")
    report = pydantic.create_model("report", city=(str, ...), degrees=(int, ...))

    async def work(model: Any) -> Any:
        expert = agents.Agent(name="Expert", model=model, output_type=report)
        first = agents.Agent(name="Desk", instructions="Hand over.", model=model, handoffs=[expert])
        steps = plan(calls(Call("transfer_to_expert", {})), says('{"city": "Rome", "degrees": 21}'))
        return await agents.Runner.run(first, steps)

    result = use(server, route, work)
    assert result.last_agent.name == "Expert"
    assert result.final_output == report(city="Rome", degrees=21)
