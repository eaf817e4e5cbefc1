"""Plans for the scripted model. A plan is written into the user's message, and the model reads it from its prompt.

    text = plan(calls(add(a=2, b=3)), says("It is {result}."))

A step of a plan is one answer. The model finds the last plan in its prompt and counts the answers after it.
`{result}` is the last tool result, and `{seen}` the number of answers and results in the prompt. So an answer
is right only if the client sent everything back and the template put it into the prompt. In templates of
other families, the model cannot tell answers from results. There, tools return `[[...]]`, the model counts
these marks, and a step has one call. A call of a tool that the prompt does not describe is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.template.call_writer import written_call
from localllm.template.format import AnswerFormat

MARK = "PLAN:"
OPENING = "<|im_start|>assistant<|im_sep|>"
RESULT, RESULT_END = "<tool_response>\n", "\n</tool_response>"
UNPLANNED = "Fine."

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: Mapping[str, Any]


def says(text: str, thought: str = "") -> Step:
    """Plan an answer with text."""
    return {"text": text, "thought": thought}


def calls(*made: Call, text: str = "", thought: str = "") -> Step:
    """Plan an answer with text and then tool calls."""
    return {"text": text, "thought": thought, "calls": [[each.name, dict(each.arguments)] for each in made]}


def plan(*steps: Step) -> str:
    """Return a user message that makes the model take these steps, one answer each."""
    return f"Do what the plan says.\n{MARK} {json.dumps(steps)}\n"


def answer_to(prompt: str, format_: AnswerFormat) -> str:
    """Return the scripted model's answer to a prompt, in the model's format for reasoning and tool calls."""
    place = prompt.rfind(MARK)
    if place < 0:
        return UNPLANNED
    steps, length = json.JSONDecoder().raw_decode(prompt[place + len(MARK) + 1 :])
    after = prompt[place + len(MARK) + 1 + length :]
    before, behind, number = RESULT, RESULT_END, after.count(OPENING) - 1
    if OPENING not in prompt:
        before, behind, number = "[[", "]]", after.count("[[")
    step = steps[number] if number < len(steps) else {"text": UNPLANNED}
    begin = after.rfind(before)
    result = after[begin + len(before) : after.index(behind, begin)] if begin >= 0 else ""
    seen = number + after.count(before)

    def filled(text: str) -> str:
        return text.replace("{result}", result).replace("{seen}", str(seen))

    thinking = format_.thinking
    begun = thinking is not None and bool(thinking.start) and prompt.rstrip().endswith(thinking.start)
    parts = [f"\n{thinking.end}\n\n"] if thinking is not None and begun else []
    parts += [f"<think>\n{step['thought']}\n</think>\n\n"] if step.get("thought") else []
    opening, closing = format_.around
    parts.append(f"{opening}{filled(step['text'])}{closing}" if step["text"] else "")
    for at, (name, arguments) in enumerate(step.get("calls", ())):
        assert format_.calls is not None
        assert name in prompt[:place] + after, f"the prompt does not tell of {name}"
        done = {key: filled(value) if isinstance(value, str) else value for key, value in arguments.items()}
        parts.append(("\n" if parts[-1] else "") + written_call(format_.calls, name, done, at))
    return "".join(parts)
