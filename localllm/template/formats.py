"""The table of answer formats: how a model writes reasoning and tool calls, determined by its chat template.

An entry matches by substrings of the template. Reasoning and calls are matched separately, because model families
combine them differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from localllm.template.format import (
    GEMMA,
    AnswerFormat,
    Calls,
    Channels,
    JsonCalls,
    NamedCalls,
    NestedCalls,
    Pattern,
    PythonCalls,
    ReasoningMarkers,
    TaggedCalls,
)

THINK = ReasoningMarkers("<think>", "</think>")
HERMES = JsonCalls(section=("<tool_call>", "</tool_call>"), again=True)


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A call format, used by templates that contain all of `texts`."""

    name: str
    texts: tuple[str, ...]
    calls: Calls
    thinking: ReasoningMarkers | None = None  # used only if `THOUGHTS` has no match
    channels: Channels | None = None
    dropped: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")  # texts before and after content
    calls_in_reasoning: bool = False  # whether to parse calls inside reasoning, instead of treating them as text


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
    (">>>${recipient}", ReasoningMarkers("", "")),
    ("<|channel|>", ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>", resume="<|start|>assistant")),
    ("<think", THINK),
    ("</think>", THINK),
)

_MISTRAL = ("[TOOL_CALLS]", "[ARGS]")


def _arg_tags(name: str, suffix: str = "", section: tuple[str, str] = ("", "")) -> TaggedCalls:
    """Return GLM's call format: alternating keys and values."""
    return TaggedCalls(
        section,
        begin=Pattern(name),
        key=Pattern(f"<arg_key{suffix}>{{key}}</arg_key{suffix}>"),
        value=f"<arg_value{suffix}>",
        close=f"</arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
    )


def _parameters(section: tuple[str, str], lines: bool) -> TaggedCalls:
    """Return Qwen3-Coder's call format."""
    return TaggedCalls(
        section,
        begin=Pattern("<function={name}>"),
        key=Pattern("<parameter={key}>"),
        close="</parameter>",
        end="</function>",
        lines=lines,
    )


def _invoke(section: tuple[str, str], mark: str = "", more: str = "") -> TaggedCalls:
    """Return a format with <invoke name="..."> <parameter name="...">."""
    return TaggedCalls(
        section,
        begin=Pattern(f'<{mark}invoke name="{{name}}">'),
        key=Pattern(f'<{mark}parameter name="{{key}}"{more}>'),
        close=f"</{mark}parameter>",
        end=f"</{mark}invoke>",
    )


def _dsml(section: str) -> TaggedCalls:
    mark = "｜DSML｜"
    return _invoke((f"<{mark}{section}>", f"</{mark}{section}>"), mark, ' string="{string}"')


def _deepseek(begin: str, *end: str) -> NamedCalls:
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return NamedCalls(section, (Pattern(f"<｜tool▁call▁begin｜>{begin}"),), (*end, "<｜tool▁call▁end｜>"))


def _kimi3() -> TaggedCalls:
    return TaggedCalls(
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        begin=Pattern('<|open|>call tool="{name}" index="{n}"<|sep|>'),
        key=Pattern('<|open|>argument key="{key}" type="{type}"<|sep|>'),
        close="<|close|>argument<|sep|>",
        end="<|close|>call<|sep|>",
        gap="",
    )


ROWS: tuple[FormatRow, ...] = (  # the first match is used: special families precede families with the same markers
    FormatRow(
        "harmony",
        ("<|channel|>", "<|message|>"),
        NamedCalls(
            begin=(Pattern(" to={name}<|channel|>commentary <|constrain|>json<|message|>"),),
            end=("<|call|>",),
            prefix="functions.",
        ),
        channels=Channels(
            "harmony", "<|start|>assistant", "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|channel|>")
        ),
        around=("<|channel|>final<|message|>", ""),
    ),
    FormatRow(
        "muse",
        ("<atem:function_calls>", "<|message|>"),
        _invoke(("<atem:function_calls>", "</atem:function_calls>"), "atem:"),
        channels=Channels("recipients", "<|start|>assistant", "<|message|>", ("<|eom|>", "<|eot|>")),
        around=(" to=user<|message|>", ""),
    ),
    FormatRow(
        "functionary-v3.2",
        (">>>${recipient}",),
        NamedCalls(begin=(Pattern(">>>{name}\n"),)),
        channels=Channels("arrows", ">>>", "\n", ()),
        around=("all\n", ""),
    ),
    FormatRow(
        "kimi-k3",
        ("<|open|>", "<|close|>", "<|end_of_msg|>"),
        _kimi3(),
        ReasoningMarkers(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            ended_by=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
            anywhere=True,
        ),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
    ),
    FormatRow(
        "solar",
        ("<|tool_call:begin|>", "<|tool_call:args|>"),
        NamedCalls(
            ("<|tool_calls|>", "<|calls|>"),
            (Pattern("<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>"),),
            ("<|tool_call:end|>",),
        ),
        ReasoningMarkers("<|think|>", "<|end|>", ("<|content|>",), anywhere=True, resume="<|begin|>assistant"),
        dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
        around=("<|content|>", ""),
    ),
    FormatRow(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        NamedCalls(
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            (
                Pattern("<|tool_call_begin|>{name}:{n}<|tool_call_argument_begin|>"),
                Pattern("<|tool_call_begin|>{name}<|tool_call_argument_begin|>"),
            ),
            ("<|tool_call_end|>",),
            prefix="functions.",
            whole_id=True,
        ),
        calls_in_reasoning=True,
    ),
    FormatRow(
        "hunyuan-3",
        ("hy_Assistant", "<arg_key"),
        _arg_tags(
            "<tool_call:opensource>{name}<tool_sep:opensource>",
            ":opensource",
            ("<tool_calls:opensource>", "</tool_calls:opensource>"),
        ),
    ),
    FormatRow(
        "minimax-m3",
        ("]<]minimax[>[", "<tool_call>"),
        NestedCalls(
            ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
            "]<]minimax[>[",
            Pattern(']<]minimax[>[<invoke name="{name}">'),
            "]<]minimax[>[</invoke>",
        ),
    ),
    FormatRow("minimax-m2", ("<minimax:tool_call>",), _invoke(("<minimax:tool_call>", "</minimax:tool_call>"))),
    FormatRow("deepseek-v3.2", ("DSML", "function_calls"), _dsml("function_calls"), calls_in_reasoning=True),
    FormatRow("deepseek-v4", ("DSML", "tool_calls"), _dsml("tool_calls"), calls_in_reasoning=True),
    FormatRow(
        "deepseek-r1",
        ("<｜tool▁call▁begin｜>", "```json"),
        _deepseek("function<｜tool▁sep｜>{name}\n```json\n", "\n```"),
    ),
    FormatRow("deepseek-v3.1", ("<｜tool▁call▁begin｜>",), _deepseek("{name}<｜tool▁sep｜>")),
    FormatRow(
        "gemma-4",
        ("<|tool_call>",),
        NamedCalls(begin=(Pattern("<|tool_call>call:{name}"),), end=("<tool_call|>",), style=GEMMA),
        dropped=("<|channel>",),  # some answers repeat this marker before reasoning
    ),
    FormatRow("seed", ("<seed:tool_call>",), _parameters(("<seed:tool_call>", "</seed:tool_call>"), lines=False)),
    FormatRow(
        "ling-3",
        ("<|role_end|>", "<arg_key>", "<arg_value>"),
        _arg_tags("<tool_call>{name}"),
        dropped=("<|role_end|>",),  # some answers contain this marker as text
        calls_in_reasoning=True,
    ),
    FormatRow("glm", ("<arg_key>", "<arg_value>"), _arg_tags("<tool_call>{name}")),
    FormatRow(
        "qwen3-coder",
        ("<function=", "<parameter="),
        _parameters(("<tool_call>", "</tool_call>"), lines=True),
        calls_in_reasoning=True,
    ),
    FormatRow(
        "minicpm5",
        ('<function name="', '<param name="'),
        TaggedCalls(
            begin=Pattern('<function name="{name}">'),
            key=Pattern('<param name="{key}">'),
            close="</param>",
            end="</function>",
            gap="",
            cdata=True,
        ),
    ),
    FormatRow(
        "apertus", ("<|tools_prefix|>",), JsonCalls(("<|tools_prefix|>", "<|tools_suffix|>"), listed=True, keyed=True)
    ),
    FormatRow("nemotron-v2", ("<TOOLCALL>",), JsonCalls(("<TOOLCALL>", "</TOOLCALL>"), listed=True)),
    FormatRow(
        "mistral-call-id",
        (*_MISTRAL, "[CALL_ID]"),
        NamedCalls(begin=(Pattern("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]"), Pattern("[TOOL_CALLS]{name}[ARGS]"))),
    ),
    FormatRow(
        "mistral",
        _MISTRAL,
        NamedCalls(begin=(Pattern("[TOOL_CALLS]{name}[ARGS]"), Pattern("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]"))),
    ),
    FormatRow("mistral-nemo", ("[TOOL_CALLS]",), JsonCalls(("[TOOL_CALLS]", ""), listed=True)),
    FormatRow(
        "cohere-2-moe",
        ("<|START_ACTION|>", "<|START_TEXT|>"),
        JsonCalls(("<|START_ACTION|>", "<|END_ACTION|>"), "tool_name", "parameters", True, id_key="tool_call_id"),
        dropped=("<|START_TEXT|>", "<|END_TEXT|>"),
        around=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    FormatRow(
        "command-r7b",
        ("<|START_ACTION|>",),
        JsonCalls(("<|START_ACTION|>", "<|END_ACTION|>"), "tool_name", "parameters", True, id_key="tool_call_id"),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    FormatRow(
        "command-r-plus",
        ("Action:", "```json"),
        JsonCalls(("Action:\n```json", "```"), "tool_name", "parameters", True),
    ),
    FormatRow(
        "gigachat-3.1",
        ("<|function_call|>", "<|role_sep|>"),
        JsonCalls(("<|function_call|>", "")),
        dropped=("<|message_sep|>",),
    ),
    FormatRow(
        "gigachat-3",
        ("<|role_sep|>", "<|message_sep|>"),
        JsonCalls(("<|message_sep|>\n\nfunction call<|role_sep|>\n", "")),
        dropped=("<|message_sep|>",),
    ),
    FormatRow("firefunction", ("functools",), JsonCalls(("functools", ""), listed=True)),
    FormatRow(
        "functionary-v3.1",
        ("function_name", "<|python_tag|>"),
        NamedCalls(begin=(Pattern("<function={name}>"),), end=("</function>",)),
    ),
    FormatRow("lfm2", ("List of tools: ",), PythonCalls(("<|tool_call_start|>", "<|tool_call_end|>"))),
    FormatRow("lfm2", ("<|tool_call_start|>",), PythonCalls(("<|tool_call_start|>", "<|tool_call_end|>"))),
    FormatRow("phi-4-mini", ("<|/tool_call|>",), JsonCalls(("<|tool_call|>", "<|/tool_call|>"), listed=True)),
    FormatRow("granite-3", ("<|tool_call|>",), JsonCalls(("<|tool_call|>", ""), listed=True)),
    FormatRow("minimax-m1", ("<tool_calls>", "<end_of_sentence>"), JsonCalls(("<tool_calls>", "</tool_calls>"))),
    FormatRow("list", ("<tool_calls>",), JsonCalls(("<tool_calls>", "</tool_calls>"), listed=True)),
    FormatRow(
        "llama-3",
        ('"parameters": dictionary',),
        JsonCalls(arguments="parameters", bare=True),
        dropped=("<|python_tag|>",),
    ),
    FormatRow("hermes", ("<tool_call>",), HERMES),
)

_TOOLS = re.compile(r"\b(?:tools|functions)\b")


def find_format(template: str) -> AnswerFormat:
    """Return the answer format of a model by its chat template.

    A template without a call format gets "hermes", and is not `native`.
    """
    row = next((row for row in ROWS if all(text in template for text in row.texts)), None)
    found = next((thinking for text, thinking in THOUGHTS if text in template), None)
    if row is None:
        thinking = _spaced(found or THINK, template)
        return AnswerFormat("hermes", thinking, HERMES, thinks=found is not None, native=False)
    known = row.thinking or found
    return AnswerFormat(
        row.name,
        _spaced(known or THINK, template),
        row.calls,
        row.channels,
        row.dropped,
        row.around,
        known is not None and bool(known.start),
        native=_TOOLS.search(template) is not None,
        calls_in_reasoning=row.calls_in_reasoning,
    )


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
