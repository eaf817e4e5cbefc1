"""Tool calls in the formats of other model families through the `openai` package, on one server with a model
for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Server, serving, write_model
from tests.clients.plans import Call, calls, plan, says
from tests.conftest import reference

openai = pytest.importorskip("openai", reason="the openai package is not installed")

FAMILIES = (
    "Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "GLM-4.6",
    "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407", "deepseek-ai-DeepSeek-V3.1",
    "openai-gpt-oss-120b", "moonshotai-Kimi-K2", "LFM2-8B-A1B", "google-gemma-4-31B-it", "ibm-granite-granite-4.0",
    "Qwen3.5-4B", "CohereForAI-c4ai-command-r-plus-tool_use", "MiniMax-M3", "deepseek-ai-DeepSeek-V3.2",
)  # fmt: skip
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "the word"},
                "most": {"type": "integer", "description": "how many to find"},
            },
            "required": ["word"],
        },
    },
}
STEPS = plan(
    calls(Call("look_up", {"word": "owl", "most": 3})),
    calls(Call("look_up", {"word": "öre {result}"})),
    says("Found {result}."),
)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_model(folder / f"{name}.gguf", reference("templates", f"{name}.jinja"))
    with serving(folder, "--models", str(folder), "-c", "4096") as it:
        yield it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_with_tools(families: Server, family: str, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": STEPS}]
    asked: list[Any] = []
    with openai.OpenAI(base_url=f"{families.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for _ in range(3):
            if stream:
                with client.chat.completions.stream(model=family, messages=messages, tools=[LOOK]) as events:
                    body = events.until_done().get_final_completion()
            else:
                body = client.chat.completions.create(model=family, messages=messages, tools=[LOOK])
            [choice] = body.choices
            made = choice.message.tool_calls or []
            messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": made or None})
            for call in made:
                asked.append(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"[[{len(asked)} of it]]"})
    assert asked == [{"word": "owl", "most": 3}, {"word": "öre 1 of it"}]
    assert choice.message.content.strip() == "Found 2 of it."
    assert choice.finish_reason == "stop"


WRITTEN = json.loads((Path(__file__).parents[1] / "localllm/server/llamacpp/prompts.json").read_text(encoding="utf-8"))
ENDS = {"MiniMax-M3": "[e~[", "deepseek-ai-DeepSeek-V3.2": "<｜end▁of▁sentence｜>"}


@pytest.mark.parametrize("family", ENDS)
def test_a_call_as_llama_server_writes_it(families: Server, family: str) -> None:
    """The answer is the text that llama-server generates for a call with the original chat template."""
    before, whole = (WRITTEN["prompts"][f"{family} {case}"] for case in ("tools", "called"))
    written = (
        whole.removeprefix(before).split(ENDS[family])[0].partition("</think>" if "DeepSeek" in family else "nk>")[2]
    )
    request = WRITTEN["requests"]["called"]
    with openai.OpenAI(base_url=f"{families.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        body = client.chat.completions.create(
            model=family, messages=[{"role": "user", "content": plan(says(written))}], tools=request["tools"]
        )
    [choice] = body.choices
    [made] = choice.message.tool_calls or []
    assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", {"city": "Oslo", "days": 2})
    assert not (choice.message.content or "").strip()
    assert choice.finish_reason == "tool_calls"
