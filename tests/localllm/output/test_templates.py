"""An assistant message, rendered by a reference template and parsed again, is the same message.

The templates come from the models' publishers, so they show the models' output format. Parts that a template omits
(earlier reasoning, content next to calls) cannot be recovered; everything else must be.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from localllm.template import ChatTemplate
from localllm.template.formats import find_format
from localllm.template.reasoning import reasoning_state
from localllm.template.tool_messages import call_form, fitted
from tests.conftest import SHARED_DATA, reference
from tests.localllm.output.support import TOOLS, chat_template, read

NAMES = sorted(path.name for path in (SHARED_DATA / "templates").glob("*.jinja"))
REASONING, CONTENT = "I should look.\nTwice.", "Let me look."
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'São "Paulo"\n<b>', "days": 3, "units": {"t": "C"}}),
    ("search", {"query": "12", "deep": True}),
]
ONE_CALL = ("GigaChat3", "meta-llama", "openai-gpt-oss")  # templates that allow one call per message
ONLY_CALLS = (
    "deepseek-ai-DeepSeek-R1",
    "llama-cpp-deepseek-r1",
    "NVIDIA-Nemotron-Nano-v2",
    "openai-gpt-oss",
)  # templates that drop the content of messages with calls
ENDS = (  # end-of-message tokens
    *(
        "<|im_end|>",
        "</s>",
        "<|end|>\n",
        "<|eot_id|>",
        "<|eom_id|>",
        "<seed:eos>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|>",
        "[e~[",
        "<|end_of_msg|>",
    ),
    *("<end_of_sentence>", "<SPECIAL_12>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
    *("<|end_of_text|>", "<|role_end|>", "</assistant>", "<｜hy_eos:opensource｜>", "<sep>", "<|call|>", "<|eot|>"),
)
# Templates that drop the reasoning of messages with calls, or do not support reasoning.
NO_REASONING = (
    *(
        "Apertus",
        "CohereForAI-c4ai-command-r-plus",
        "GigaChat3",
        "HuggingFaceTB",
        "Kimi-K2",
        "LFM2-",
        "LFM2.5-Instruct",
    ),
    *("MiMo", "MiniMax-M1", "Mistral-Small", "NVIDIA-Nemotron-Nano", "NousResearch", "Qwen-QwQ", "Qwen-Qwen2.5"),
    *("Qwen3-Coder", "deepseek-ai-DeepSeek-R1", "deepseek-ai-DeepSeek-V3.1", "fireworks-ai", "google-gemma-2"),
    *("ibm-granite", "llama-cpp", "meetkai", "meta-llama", "microsoft", "mistralai", "moonshotai"),
    *("unsloth", "upstage"),
)
NO_CONTENT = (  # templates that drop the content next to calls
    *("Cohere2MoE", "CohereForAI-c4ai-command-r7b", "MiniMax-M1", "Mistral-Small", "NousResearch", "muse", "upstage"),
    *("mistralai-Mistral-Nemo", "meta-llama", *ONLY_CALLS),
)


def _answer(template: ChatTemplate, answer: dict[str, Any], thinking: bool) -> tuple[str, str]:
    """Return the end of the prompt and the text of the answer, as the template renders them."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
    variables = {"enable_thinking": thinking, "thinking": thinking}
    prompt = str.__str__(template.render(asked, True, TOOLS, variables).text)
    whole = str.__str__(template.render([*asked, answer], False, TOOLS, variables).text)
    same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    while whole[same - 1] in "</|":  # the prompts diverge inside a tag
        same -= 1
    text = whole[same:].removeprefix("<|CHATBOT_TOKEN|>")  # Command-R+ puts instructions before the answer
    ends = [text.index(end) for end in ENDS if end in text]
    text = text[: min(ends, default=len(text))]
    # Some templates render the start of the reasoning only in the prompt.
    begun = text.startswith(REASONING) and reasoning_state(find_format(template.source), prompt) == "open"
    return prompt if begun else prompt[:same], text


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_is_read_back(name: str, thinking: bool) -> None:
    source = reference("templates", name).read_text(encoding="utf-8")
    template = chat_template(source, datetime(2026, 1, 1))
    format_, form = find_format(source), call_form(template)
    calls = CALLS[:1] if name.startswith(ONE_CALL) else CALLS
    message: dict[str, Any] = {
        "role": "assistant",
        "reasoning_content": REASONING,
        "content": "" if name.startswith(ONLY_CALLS) else CONTENT,
        "tool_calls": [
            {"id": f"call{at:05}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
            for at, (tool, arguments) in enumerate(calls)
        ],
    }
    if name.startswith("deepseek-ai-DeepSeek-R1-Distill-L"):
        message["content"] = None
    [fit] = fitted([message], [], format_, form)
    tail, text = _answer(template, fit, thinking)
    found = read(format_, text, tail)
    assert found.values == calls, text
    assert found.content.strip() == ("" if name.startswith(NO_CONTENT) else CONTENT), text
    if thinking and not name.startswith(NO_REASONING):
        assert found.reasoning == REASONING, text
    else:
        assert found.reasoning in (REASONING if REASONING in text else "", ""), text
    bytewise = read(format_, text, tail, cuts=range(1, len(text)))
    assert bytewise == found
