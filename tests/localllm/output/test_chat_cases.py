"""The cases of llama.cpp's test-chat.cpp: 463 answers, and the prompts of 105 continued answers.

As in llama.cpp, white space around reasoning and content is ignored, and arguments are compared as values. `ANSWERS`
and `PROMPTS` list our differences with reasons. The tests fail if an unlisted case differs, or if a
listed case no longer differs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from localllm.options.thinking import Thinking
from localllm.template.formats import find_format
from localllm.template.reasoning import begin, with_thinking
from tests.conftest import reference
from tests.localllm.output.support import Read, chat_template, read

DATA: dict[str, Any] = json.loads((Path(__file__).with_name("data") / "chat_cases.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = DATA["cases"]
BEGUN = [case for case in (*DATA["prompts"], *CASES) if "begun" in case]
TAILS = {  # (template, thinking is off, end of the prompt)
    (case["template"], case.get("off", False), case.get("tail", ""))
    for case in (*DATA["prompts"], *CASES)
    if "begun" not in case
}
NAMES = sorted({case["template"] for case in CASES})

_FENCE = "a schema allows bare JSON only, so a model cannot write a fence"
_CUT = "a call that broke off before its arguments stays text: without arguments, a client could run it"
_START = "a thought that stays in the content has its start, as llama.cpp shows it for all other families"
_HERE = "the line is the template's mark of a thought, not a part of it"
_HIDDEN = "these control tokens are hidden before an answer is read; the case spells them"
_LATE = "the model writes the id after the arguments, which are shown as they come: the call has an id of ours"
_PLAIN = "the template knows no thoughts, so none is continued"
ANSWERS: dict[int, str] = {  # case number: reason
    31: _FENCE,
    49: _CUT,
    60: _CUT,
    193: _START,
    238: _PLAIN,
    340: _HIDDEN,
    344: _LATE,
    390: _HERE,
    391: _HERE,
    402: _FENCE,
}
PROMPTS: dict[str, str] = {  # template: reason
    "Apertus-8B-Instruct": "llama.cpp does not know its thoughts",
    "Apriel-1.6-15b-Thinker-fixed": _HERE,
    "unsloth-Apriel-1.5": "llama.cpp does not know its thoughts",
    "LFM2-8B-A1B": _PLAIN,
    "moonshotai-Kimi-K2": _PLAIN,
    "meetkai-functionary-medium-v3.2": "without anything to continue, the model itself says to whom it speaks",
}


def answered(case: dict[str, Any], text: str, cuts: list[int] | range = range(0)) -> Read:
    """Parse a case's answer, or a prefix of it, that arrives in pieces."""
    format_, tail = find_format(DATA["templates"][case["template"]]), case.get("tail", "")
    if "begun" in case:
        tail = prompted(case)[1]
    tools = [DATA["tools"][number] for number in case.get("tools", ())]
    return read(format_, text, tail, tools, cuts, inline=case.get("inline", False), resumed="begun" in case)


def prompted(case: dict[str, Any]) -> tuple[str, str]:
    """Return the end of a continued answer's prompt, with and without the continued text."""
    format_, tail = find_format(DATA["templates"][case["template"]]), case.get("tail", "")
    found = begin(format_, tail, *case["begun"])
    opened = tail[: len(tail) - found.cut] + found.opening
    closed = opened + found.reasoning + found.closing
    return closed + found.content, opened if case["begun"][1] is None else closed


def values(calls: list[tuple[str, str]], whole: bool) -> list[tuple[str, Any]]:
    """Return calls with parsed arguments. Incomplete arguments stay text, without spaces."""
    return [(name, json.loads(text or "{}") if whole else text.replace(" ", "")) for name, text in calls]


def agrees(case: dict[str, Any]) -> bool:
    found = answered(case, case["text"])
    thought, content = case.get("begun", ("", ""))
    expected = (case.get("reasoning", ""), case.get("content", ""))
    shown = ((thought if expected[0] else "") + found.reasoning, (content or "") + found.content)
    if [text.strip() for text in shown] != [text.strip() for text in expected]:
        return False
    calls = case.get("calls", [])
    ids = all(call[2] == id_ for call, id_ in zip(calls, found.ids, strict=False) if len(call) > 2 and len(call[2]) > 7)
    whole = not case.get("partial")
    return ids and values(found.calls, whole) == values([(name, text) for name, text, *_ in calls], whole)


def test_all_cases_are_here() -> None:
    assert (len(CASES), len(DATA["prompts"]), len(BEGUN)) == (463, 48, 72 + 33)
    assert max(ANSWERS) < len(CASES)
    assert set(PROMPTS) <= set(DATA["templates"])
    told = f"in {len(CASES) - len(ANSWERS)} of the {len(CASES)} cases"
    assert told in (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_answers(name: str) -> None:
    differing = {number for number, case in enumerate(CASES) if case["template"] == name and not agrees(case)}
    assert differing == {number for number in ANSWERS if CASES[number]["template"] == name}


@pytest.mark.parametrize("name", NAMES)
def test_cuts_do_not_change_an_answer(name: str) -> None:
    """Splitting an answer at every character or at random gives the same result, for whole and truncated answers."""
    chance = random.Random(name)
    for case in (case for case in CASES if case["template"] == name):
        text = case["text"]
        for end in (len(text), *(chance.randrange(len(text)) for _ in range(3))):
            whole = answered(case, text[:end])
            assert answered(case, text[:end], range(1, end)) == whole
            assert answered(case, text[:end], sorted(chance.choices(range(end + 1), k=5))) == whole


@pytest.mark.parametrize("name", sorted({case["template"] for case in BEGUN}))
def test_prompts_of_continued_answers(name: str) -> None:
    """Prompts of continued answers equal llama.cpp's except for white space around markers, which llama.cpp drops for
    some formats.
    """
    cases = [case for case in BEGUN if case["template"] == name]
    differing = [case for case in cases if "".join(prompted(case)[0].split()) != "".join(case["prompt"].split())]
    assert bool(differing) == (name in PROMPTS), differing


@pytest.mark.parametrize("name", sorted({name for name, _, _ in TAILS}))
def test_prompts_think_unless_told_otherwise(name: str) -> None:
    """Prompts request thinking by default, even if the template treats a missing variable as "off"."""
    source = reference("templates", f"{name}.jinja").read_text(encoding="utf-8")
    template = chat_template(source)
    for off, tail in ((off, tail) for other, off, tail in TAILS if other == name):
        variables = with_thinking(source, Thinking(False if off else None).variables)
        prompt = template.render([{"role": "user", "content": "Hey there!"}], True, None, variables).text
        assert prompt.endswith(tail)


@pytest.mark.parametrize("name", sorted(DATA["templates"]))
def test_a_sketch_has_the_format_of_its_template(name: str) -> None:
    source = reference("templates", f"{name}.jinja").read_text(encoding="utf-8")
    assert find_format(source) == find_format(DATA["templates"][name])
