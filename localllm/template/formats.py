"""The table of answer formats: how a model writes reasoning and tool calls, determined by its chat template.

An entry matches by substrings of the template. Reasoning and calls are matched separately, because model families
combine them differently.
"""

from __future__ import annotations

import re
from dataclasses import replace

from localllm.template.format import AnswerFormat, Calls, Channels, Items, ReasoningMarkers

THINK = ReasoningMarkers("<think>", "</think>")

THOUGHTS: tuple[tuple[str, ReasoningMarkers], ...] = (  # (substring of the template, markers); the first match is used
    ("<seed:think>", ReasoningMarkers("<seed:think>", "</seed:think>")),
    ("<mm:think>", ReasoningMarkers("<mm:think>", "</mm:think>")),
    ("':opensource'", ReasoningMarkers("<think:opensource>", "</think:opensource>")),
    ("[THINK]", ReasoningMarkers("[THINK]", "[/THINK]", anywhere=True)),
    ("<|START_THINKING|>", ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True)),
    ("<|channel>", ReasoningMarkers("<|channel>thought", "<channel|>", anywhere=True)),
    ("<|inner_prefix|>", ReasoningMarkers("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True)),
    ("[BEGIN FINAL RESPONSE]", ReasoningMarkers("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    ("<atem:", ReasoningMarkers(" to=self<|message|>", "<|eom|>", resume="<|start|>assistant")),
    (">>>${recipient}", ReasoningMarkers()),
    ("<|channel|>", ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>", resume="<|start|>assistant")),
    ("<think", THINK),
    ("</think>", THINK),
)


_ITEM = re.compile(r"(.*?)((?<=>)<[^<>]*>)?(\n?)\{value\}\n?(.*?)(\n?)", re.DOTALL)


def _calls(call: str, section: str = "{calls}", items: Items | None = None) -> Calls:
    """Return the format of calls that are written as `call`, with {arguments} in it.

    The section has {calls}, [{calls}] for a list, or {call} if each call has a separate section. A call that begins
    with a brace is read as any JSON object with a name and arguments. After other calls with JSON arguments, each tag
    is optional when it is read.
    """
    begin, end = call.split("{arguments}")
    before, kind, after = re.split(r"\{(calls?)\}", section)
    listed = before.endswith("[")
    around = (before[:-1], after[1:]) if listed else (before, after)
    if items is None:
        return Calls(begin, tuple(re.findall("<?[^<]+", end)), around, listed=listed, again=kind == "call")
    return Calls(begin.removesuffix("\n"), (end,), around, items, listed=listed)


def _items(item: str) -> Items:
    """Return the format of arguments that are each written as `item`, with {key} and {value} in it.

    Line breaks next to {value} are not part of it. A line break at the end is written, but may be missing when an item
    is read. So may be white space between two tags before {value}.
    """
    found = _ITEM.fullmatch(item)
    assert found is not None
    return Items(found[1], found[4], found[2] or "", lines=bool(found[3]), gap=found[5])


_JSON = '{"name": {name}, "arguments": {arguments}}'  # these keys are written; all known keys are read
_COHERE = '{"tool_call_id": "{n}", "tool_name": {name}, "parameters": {arguments}}'
_TOOL_NAME = '{"tool_name": {name}, "parameters": {arguments}}'
_ACTION = "<|START_ACTION|>[{calls}]<|END_ACTION|>"
_MINIMAX = "]<]minimax[>["
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]")
_MISTRAL_CALLS = ("[TOOL_CALLS]{name}[ARGS]", "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]")
_KIMI = "<|tool_call_begin|>{name}:{n}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
_PYTHON = _calls(
    "{name}({arguments})",
    "<|tool_call_start|>[{calls}]<|tool_call_end|>",
    replace(_items("{key}={value}"), separator=", "),
)


def _arg_tags(name: str, suffix: str = "", section: str = "{calls}") -> Calls:
    """Return GLM's call format: alternating keys and values."""
    key = f"<arg_key{suffix}>{{key}}</arg_key{suffix}>"
    items = _items(f"{key}<arg_value{suffix}>{{value}}</arg_value{suffix}>\n")
    return _calls(f"{name}\n{{arguments}}</tool_call{suffix}>", section, items)


def _parameters(section: str, value: str) -> Calls:
    """Return Qwen3-Coder's call format."""
    items = _items(f"<parameter={{key}}>{value}</parameter>\n")
    return _calls("<function={name}>\n{arguments}</function>", section, items)


def _invoke(section: str, mark: str = "", more: str = "") -> Calls:
    """Return a format with <invoke name="..."> <parameter name="...">."""
    items = _items(f'<{mark}parameter name="{{key}}"{more}>{{value}}</{mark}parameter>\n')
    call = f'<{mark}invoke name="{{name}}">\n{{arguments}}</{mark}invoke>'
    return _calls(call, f"<{section}>{{calls}}</{section}>", items)


def _dsml(section: str) -> Calls:
    return _invoke(f"｜DSML｜{section}", "｜DSML｜", ' string="{string}"')


def _deepseek(call: str) -> Calls:
    section = "<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"
    return _calls(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>", section)


ROWS: tuple[AnswerFormat, ...] = (  # the first match is used: special families precede families with the same markers
    AnswerFormat(
        "harmony",
        ("<|channel|>", "<|message|>"),
        replace(
            _calls(" to={name}<|channel|>commentary <|constrain|>json<|message|>{arguments}<|call|>"),
            prefix="functions.",
        ),
        channels=Channels(
            "harmony", "<|start|>assistant", "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|channel|>")
        ),
        around=("<|channel|>final<|message|>", ""),
    ),
    AnswerFormat(
        "muse",
        ("<atem:function_calls>", "<|message|>"),
        _invoke("atem:function_calls", "atem:"),
        channels=Channels("recipients", "<|start|>assistant", "<|message|>", ("<|eom|>", "<|eot|>")),
        around=(" to=user<|message|>", ""),
    ),
    AnswerFormat(
        "functionary-v3.2",
        (">>>${recipient}",),
        _calls(">>>{name}\n{arguments}"),
        channels=Channels("arrows", ">>>", "\n", ()),
        around=("all\n", ""),
    ),
    AnswerFormat(
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|end_of_msg|>"),
        _calls(
            '<|open|>call tool="{name}" index="{count}"<|sep|>{arguments}<|close|>call<|sep|>',
            "<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>",
            _items('<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'),
        ),
        ReasoningMarkers(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            ended_by=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
            anywhere=True,
        ),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
    ),
    AnswerFormat(
        "solar",
        ("<|tool_call:begin|>", "<|tool_call:args|>"),
        _calls(
            "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
            "<|tool_calls|>{calls}<|calls|>",
        ),
        ReasoningMarkers("<|think|>", "<|end|>", ("<|content|>",), anywhere=True, resume="<|begin|>assistant"),
        dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
        around=("<|content|>", ""),
    ),
    AnswerFormat(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        replace(
            _calls(_KIMI, "<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"),
            also=("<|tool_call_begin|>{name}<|tool_call_argument_begin|>",),
            prefix="functions.",
            whole_id=True,
        ),
        calls_in_reasoning=True,
    ),
    AnswerFormat(
        "hunyuan-3",
        ("hy_Assistant", "<arg_key"),
        _arg_tags(
            "<tool_call:opensource>{name}<tool_sep:opensource>",
            ":opensource",
            "<tool_calls:opensource>{calls}</tool_calls:opensource>",
        ),
    ),
    AnswerFormat(
        "minimax-m3",
        (_MINIMAX, "<tool_call>"),
        _calls(
            f'{_MINIMAX}<invoke name="{{name}}">{{arguments}}{_MINIMAX}</invoke>',
            f"{_MINIMAX}<tool_call>{{calls}}{_MINIMAX}</tool_call>",
            replace(_items(f"{_MINIMAX}<{{key}}>{{value}}{_MINIMAX}</{{key}}>"), prefix=_MINIMAX),
        ),
    ),
    AnswerFormat("minimax-m2", ("<minimax:tool_call>",), _invoke("minimax:tool_call")),
    AnswerFormat(
        "deepseek-v3.2",
        ("DSML", "function_calls"),
        _dsml("function_calls"),
        calls_in_reasoning=True,
    ),
    AnswerFormat(
        "deepseek-v4",
        ("DSML", "tool_calls"),
        _dsml("tool_calls"),
        calls_in_reasoning=True,
    ),
    AnswerFormat(
        "deepseek-r1",
        ("<｜tool▁call▁begin｜>", "```json"),
        _deepseek("function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"),
    ),
    AnswerFormat(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>",),
        _deepseek("{name}<｜tool▁sep｜>{arguments}"),
    ),
    AnswerFormat(
        "gemma-4",
        ("<|tool_call>",),
        replace(_calls("<|tool_call>call:{name}{arguments}<tool_call|>"), quote='<|"|>'),
        dropped=("<|channel>",),  # some answers repeat this marker before reasoning
    ),
    AnswerFormat(
        "seed",
        ("<seed:tool_call>",),
        _parameters("<seed:tool_call>{calls}</seed:tool_call>", "{value}"),
    ),
    AnswerFormat(
        "ling-3",
        ("<|role_end|>", "<arg_key>", "<arg_value>"),
        _arg_tags("<tool_call>{name}"),
        dropped=("<|role_end|>",),  # some answers contain this marker as text
        calls_in_reasoning=True,
    ),
    AnswerFormat("glm", ("<arg_key>", "<arg_value>"), _arg_tags("<tool_call>{name}")),
    AnswerFormat(
        "qwen3-coder",
        ("<function=", "<parameter="),
        _parameters("<tool_call>{calls}</tool_call>", "\n{value}\n"),
        calls_in_reasoning=True,
    ),
    AnswerFormat(
        "minicpm5",
        ('<function name="', '<param name="'),
        _calls(
            '<function name="{name}">{arguments}</function>',
            items=replace(_items('<param name="{key}">{value}</param>'), cdata=True),
        ),
    ),
    AnswerFormat(
        "apertus",
        ("<|tools_prefix|>",),
        _calls("{{name}: {arguments}}", "<|tools_prefix|>[{calls}]<|tools_suffix|>"),
    ),
    AnswerFormat("nemotron-v2", ("<TOOLCALL>",), _calls(_JSON, "<TOOLCALL>[{calls}]</TOOLCALL>")),
    AnswerFormat(
        "mistral-call-id",
        (*_MISTRAL, "[CALL_ID]"),
        Calls(_MISTRAL_CALLS[1], also=_MISTRAL_CALLS[:1]),
    ),
    AnswerFormat("mistral", _MISTRAL, Calls(_MISTRAL_CALLS[0], also=_MISTRAL_CALLS[1:])),
    AnswerFormat("mistral-nemo", ("[TOOL_CALLS]",), _calls(_JSON, "[TOOL_CALLS][{calls}]")),
    AnswerFormat(
        "cohere-2-moe",
        ("<|START_ACTION|>", "<|START_TEXT|>"),
        _calls(_COHERE, _ACTION),
        dropped=("<|START_TEXT|>", "<|END_TEXT|>"),
        around=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    AnswerFormat(
        "command-r7b",
        ("<|START_ACTION|>",),
        _calls(_COHERE, _ACTION),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    AnswerFormat(
        "command-r-plus",
        ("Action:", "```json"),
        _calls(_TOOL_NAME, "Action:\n```json[{calls}]```"),
    ),
    AnswerFormat(
        "gigachat-3.1",
        ("<|function_call|>", "<|role_sep|>"),
        _calls(_JSON, "<|function_call|>{calls}"),
        dropped=("<|message_sep|>",),
    ),
    AnswerFormat(
        "gigachat-3",
        ("<|role_sep|>", "<|message_sep|>"),
        _calls(_JSON, "<|message_sep|>\n\nfunction call<|role_sep|>\n{calls}"),
        dropped=("<|message_sep|>",),
    ),
    AnswerFormat("firefunction", ("functools",), _calls(_JSON, "functools[{calls}]")),
    AnswerFormat(
        "functionary-v3.1", ("function_name", "<|python_tag|>"), _calls("<function={name}>{arguments}</function>")
    ),
    AnswerFormat("lfm2", ("List of tools: ",), _PYTHON),
    AnswerFormat("lfm2", ("<|tool_call_start|>",), _PYTHON),
    AnswerFormat("phi-4-mini", ("<|/tool_call|>",), _calls(_JSON, "<|tool_call|>[{calls}]<|/tool_call|>")),
    AnswerFormat("granite-3", ("<|tool_call|>",), _calls(_JSON, "<|tool_call|>[{calls}]")),
    AnswerFormat(
        "minimax-m1", ("<tool_calls>", "<end_of_sentence>"), _calls(_JSON, "<tool_calls>{calls}</tool_calls>")
    ),
    AnswerFormat("list", ("<tool_calls>",), _calls(_JSON, "<tool_calls>[{calls}]</tool_calls>")),
    AnswerFormat(
        "llama-3",
        ('"parameters": dictionary',),
        _calls('{"name": {name}, "parameters": {arguments}}'),
        dropped=("<|python_tag|>",),
    ),
    AnswerFormat("hermes", ("<tool_call>",), _calls(_JSON, "<tool_call>{call}</tool_call>")),
)

_TOOLS = re.compile(r"\b(?:tools|functions)\b")


def find_format(template: str) -> AnswerFormat:
    """Return the answer format of a model by its chat template.

    A template without a call format gets "hermes", and is not `native`.
    """
    row = next((row for row in ROWS if all(text in template for text in row.texts)), None)
    native = row is not None and _TOOLS.search(template) is not None
    row = row or ROWS[-1]
    found = next((thinking for text, thinking in THOUGHTS if text in template), None)
    known = row.thinking if row.thinking.start else found
    thinks = known is not None and bool(known.start)
    return replace(row, thinking=_spaced(known or THINK, template), thinks=thinks, native=native)


def _spaced(thinking: ReasoningMarkers, template: str) -> ReasoningMarkers:
    """Return the markers with the line breaks that the template writes next to them."""
    start, end = thinking.start, thinking.end
    if not start:
        return thinking
    joined = _JOINT.sub("", template)
    counts = (start + _BREAK in joined, _BREAK + end in joined, 1 + (end + 2 * _BREAK in joined))
    lead, before, after = ("\n" * int(count) for count in counts)
    return replace(thinking, spaces=(lead, before, after if end + _BREAK in joined else ""))


_BREAK = r"\n"  # a line break as spelled in a template's string literals
_JOINT = re.compile(r"""['"]\s*[~+]\s*['"]""")  # between two concatenated string literals
