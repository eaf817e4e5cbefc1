"""Write `data/chat_cases.json` from a dump of the cases in llama.cpp's `tests/test-chat.cpp`; see `data/README.md`.

    python -m tests.localllm.output.make_chat_cases DUMP

Each template is reduced to a sketch: the few strings that identify its format. The tests then need no templates.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from localllm.template.formats import ROWS, THOUGHTS, find_format
from tests.conftest import SHARED_DATA

DATA = Path(__file__).with_name("data") / "chat_cases.json"
BREAK = r"\n"  # escaped as in a template's string literals
CONTENT = 3  # value of `continue`: the answer continues the content, not the reasoning
REQUIRED = 1  # value of `tool_choice`


def sketch(template: str) -> str:
    """Return a short text that is detected as the same format as the template."""
    format_ = find_format(template)
    start, end = format_.thinking.start, format_.thinking.end
    spelled = (start + BREAK, BREAK + end, end + BREAK, end + 2 * BREAK, "tools")
    texts = [text for row in ROWS if row.name == format_.name for text in row.texts if text in template]
    texts += [text for text, _ in THOUGHTS if text in template][:1]
    texts += [text for text in spelled if text in re.sub(r"""['"]\s*[~+]\s*['"]""", "", template)]
    found = " ".join(texts)
    assert find_format(found) == format_, (found, format_)
    return found


def case_of(row: dict[str, Any], tools: list[Any]) -> dict[str, Any]:
    """Return the case without empty fields and defaults."""
    expected = row["expect"]
    offered = [_number(tools, tool) for tool in row["tools"] or ()]
    calls = [[call["name"], call["arguments"], *([call["id"]] if call["id"] else [])] for call in expected["calls"]]
    found = {
        "template": Path(row["path"]).stem,
        "tail": row["generation_prompt"],
        "text": row["input"],
        "tools": offered,
        "reasoning": expected["reasoning"],
        "content": expected["content"],
        "calls": calls,
        "inline": row["reasoning_format"] == "none",
        "partial": row["partial"],
        "schema": json.loads(row["schema"]) if row["schema"] else {},
        "required": row["tool_choice"] == REQUIRED,
        "parallel": row["parallel"],
        "off": not row["thinking"],
    }
    found |= _begun(row) if row["continue"] else {}
    return {key: value for key, value in found.items() if value or key in ("template", "text")}


def _number(tools: list[Any], tool: Any) -> int:
    """Return the tool's index in `tools`, appending it if it is new."""
    if tool not in tools:
        tools.append(tool)
    return tools.index(tool)


def prompt_of(row: dict[str, Any]) -> dict[str, Any]:
    found = {"template": Path(row["path"]).stem, "tail": row["generation_prompt"], "off": not row["thinking"]}
    found |= _begun(row) if row["continue"] else {}
    return {key: value for key, value in found.items() if value or key == "tail"}


def _begun(row: dict[str, Any]) -> dict[str, Any]:
    """Return the reasoning and content that a continued answer starts with, and llama.cpp's prompts with and
    without them.
    """
    last = row["messages"][-1]
    content = last["content"] if row["continue"] == CONTENT else None
    return {
        "tail": row["base"],
        "begun": [last.get("reasoning_content", ""), content],
        "prompt": row["generation_prompt"],
    }


def main(path: str) -> None:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    tools: list[Any] = []
    cases = [case_of(row, tools) for row in rows if row["kind"] == "case"]
    prompts = [prompt_of(row) for row in rows if row["kind"] == "prompt"]
    names = sorted({found["template"] for found in (*cases, *prompts)})
    files = {name: (SHARED_DATA / "templates" / f"{name}.jinja").read_text(encoding="utf-8") for name in names}
    parts = {
        "templates": [f"{json.dumps(name)}: {_json(sketch(text))}" for name, text in files.items()],
        "tools": list(map(_json, tools)),
        "prompts": list(map(_json, prompts)),
        "cases": list(map(_json, cases)),
    }
    marks = {"templates": "{}", "tools": "[]", "prompts": "[]", "cases": "[]"}
    lines = [
        "\n".join([f'"{name}": {marks[name][0]}', ",\n".join(part), marks[name][1]]) for name, part in parts.items()
    ]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
