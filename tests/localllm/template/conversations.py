"""Conversations with tools and reasoning, and small templates.

`make_transformers` stores how transformers renders them.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from tests.localllm.output.support import properties, tool

NOW = datetime(2024, 2, 29, 13, 5, 7)
# Dates that these templates use if none is passed, as in transformers. localllm passes the current date instead.
UNDATED = {
    "meta-llama-Llama-3.1-8B-Instruct.jinja": {"date_string": "26 Jul 2024"},
    "meta-llama-Llama-3.3-70B-Instruct.jinja": {"date_string": "26 Jul 2024"},
}
_CITY = {"type": "string", "description": "its name"}
_WHERE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": _CITY}},
    "additionalProperties": {"type": "string"},
}
_PROPERTIES = {"city": _CITY, "days": {"type": "integer", "default": 3}, "unit": {"enum": ["C", "F"]}, "where": _WHERE}


def _called(content: str | None = "", twice: bool = False, as_text: bool = False, **more: Any) -> dict[str, Any]:
    """Return an assistant message with one tool call or, if `twice`, two."""
    arguments: list[Any] = [{"city": 'Paris "é"', "days": 2, "deep": {"a": [1, None, True]}}, {}]
    named = zip(("abcdefghi", "jklmnopqr"), ("get_weather", "now"), arguments, strict=True)
    calls = [
        {"type": "function", "id": id_, "function": {"name": name, "arguments": json.dumps(a) if as_text else a}}
        for id_, name, a in named
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls[: 1 + twice], **more}


def _said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOLS = [
    tool(properties("city", **_PROPERTIES), "get_weather", 'Tells the <weather> & "more" – é.'),
    tool(properties(), "now", "The time."),
]
_SYSTEM, _WHO = _said("system", "You are a pirate."), _said("user", "Who are <you> & me?\n")
_ARR, _NEXT = _said("assistant", "Arr, é 漢!"), _said("user", "Where is it?")
_THOUGHT = _ARR | {"reasoning_content": "He asks who.\nI know."}
_SUN = _said("tool", '{"sun": true}', name="get_weather", tool_call_id="abcdefghi")
_TIME = _said("tool", "12:00", name="now", tool_call_id="jklmnopqr")
_SUNNY = _said("assistant", "Sunny.")
_PARTS = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]


def _case(
    *messages: dict[str, Any], tools: Any = None, prompt: bool = True, **extra: Any
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Return the messages, `tools` and `add_generation_prompt`, and further template variables."""
    return list(messages), {"tools": tools, "add_generation_prompt": prompt}, extra


CASES = {
    "plain": _case(_SYSTEM, _WHO, _ARR, _NEXT),
    "no system message": _case(_WHO),
    "no prompt": _case(_SYSTEM, _WHO, _ARR, prompt=False),
    "system message later": _case(_WHO, _ARR, _SYSTEM, _NEXT),
    "parts": _case(_SYSTEM, _said("user", _PARTS)),
    "documents": _case(_WHO, documents=[{"title": "T", "text": "body"}]),
    "variables of older templates": _case(_SYSTEM, _WHO, _ARR, _NEXT, functions="[1]", datetime="29 February 2024"),
    "tools": _case(_SYSTEM, _WHO, _ARR, _NEXT, tools=TOOLS),
    "tools, no system message": _case(_WHO, tools=TOOLS),
    "a tool": _case(_SYSTEM, _WHO, tools=TOOLS[1:]),
    "tools, more variables": _case(_WHO, tools=TOOLS, builtin_tools=["python"], tools_in_user_message=False),
    "call": _case(_SYSTEM, _WHO, _called(), _SUN, tools=TOOLS),
    "call and text": _case(_WHO, _called("Let me see."), _SUN, _SUNNY, _NEXT, tools=TOOLS),
    "two calls": _case(_SYSTEM, _WHO, _called(twice=True), _SUN, _TIME, _SUNNY, _NEXT, tools=TOOLS),
    "call, arguments as text": _case(_SYSTEM, _WHO, _called(as_text=True), _SUN, tools=TOOLS),
    "call, no content": _case(_WHO, _called(None), _SUN, tools=TOOLS),
    "reasoning": _case(_SYSTEM, _WHO, _THOUGHT, _NEXT),
    "reasoning, no prompt": _case(_WHO, _THOUGHT, prompt=False),
    "reasoning in the answer": _case(_SYSTEM, _WHO, _said("assistant", "<think>\nI.\n</think>\n\nArr!"), _NEXT),
    "reasoning kept": _case(_SYSTEM, _WHO, _THOUGHT, _NEXT, preserve_thinking=True, clear_thinking=False),
    "reasoning and call": _case(_WHO, _called(thinking="Look it up."), _SUN, tools=TOOLS),
    "reasoning by its third name": _case(_WHO, _said("assistant", "x", reasoning="Old name."), _NEXT),
    "reasoning and two calls": _case(
        _WHO, _called(twice=True, reasoning_content="Look."), _SUN, _TIME, _SUNNY | {"reasoning_content": "Done."},
        _NEXT, tools=TOOLS,
    ),
    **{f"effort {effort}": _case(_SYSTEM, _WHO, reasoning_effort=effort) for effort in ("low", "high", "none")},
}  # fmt: skip
for _on in (True, False):
    _flags = {"enable_thinking": _on, "thinking": _on}
    CASES[f"thinking {_on}"] = _case(_SYSTEM, _WHO, _ARR, _NEXT, **_flags)
    CASES[f"thinking {_on}, reasoning"] = _case(_SYSTEM, _WHO, _THOUGHT, _NEXT, **_flags)
    CASES[f"thinking {_on}, call"] = _case(
        _SYSTEM, _WHO, _called(reasoning_content="Look it up."), _SUN, tools=TOOLS, **_flags
    )

_EACH = "{% for m in messages %}\n"
SMALL = {
    "chat markup with tools and reasoning": """{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.reasoning_content is string %}
<think>{{ m.reasoning_content.strip('\\n') }}</think>
    {%- endif %}
{{ '<|im_start|>' + m.role + '\\n' + (m.content if m.content is string else m.content | map(attribute='text') | join)
}}{% for call in m.tool_calls or [] %}<tool_call>{{ {'name': call.function.name,
    'arguments': call.function.arguments} | tojson(indent=2, separators=(',', ': '), sort_keys=true) }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}{% endif %}""",
    "generation, scopes and loop controls": _EACH
    + """{% if m.role == 'tool' %}{% continue %}{% endif %}
{% set word = 'out' %}
{% generation %}{% set word = 'in' %}[{{ word }} {{ loop.index }} {{ m.content }}]{% endgeneration %}{{ word }}
{% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}{{ documents is defined }} {{ tools is defined }} {{ tools is none }} {{ reasoning_effort is defined }}""",
    "dates, JSON and filters": """{{ strftime_now('%d %b %Y') }} {{ bos_token }}{{ eos_token }}
{{ tools | tojson(ensure_ascii=True) }} {{ messages[0] | tojson(indent=1) }} {{ [1.5, none, true, 'é<&"'] | tojson }}
{% for k, v in (messages[-1] | items) if v is string %}{{ k | upper }}={{ v | replace('é', 'e') | trim | length }};
{% endfor %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ '%s-%03d' | format('a', 7) }}|
{{ messages[0].content[:7] if messages[0].content is string }}|{{ ['b', 'a'] | sort | join(', ') }}|{{ none }}|{{ x }}
{%- macro bold(text) %}**{{ text }}**{{ caller() if caller }}{% endmacro %}
{{ bold('hi') }}{% call bold('you') %} there{% endcall %}
{{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ 'a' ~ 1 ~ none }} {{ dict(a=1) }} {{ range(3) | list }} {{ 'x' in 'xyz' }}""",
    "it refuses": "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + _EACH + "{{ m.content }}{% endfor %}",
}
