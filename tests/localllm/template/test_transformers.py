"""Small templates and the 70 reference templates render as in transformers, with tools and reasoning."""

from __future__ import annotations

import json

import pytest

from localllm.template import ChatTemplate, Rendered, TemplateError
from tests.conftest import reference
from tests.localllm.output.support import chat_template
from tests.localllm.template.conversations import CASES, NOW, SMALL, UNDATED
from tests.localllm.template.make_transformers import DATA, REFUSED, checksum

STORED = json.loads(DATA.read_text(encoding="utf-8"))
# This template joins the tools with Jinja's |safe, so in transformers the model sees HTML escapes: {&#34;name&#34;: ...
ESCAPED = "meetkai-functionary-medium-v3.1.jinja"


def _rendered(template: ChatTemplate, case: str, name: str = "") -> Rendered | None:
    messages, how, extra = CASES[case]
    try:
        return template.render(messages, **how, extra=UNDATED.get(name, {}) | extra)
    except TemplateError:
        return None


@pytest.mark.parametrize("name", SMALL)
def test_small_templates(name: str) -> None:
    template = chat_template(SMALL[name], NOW)
    equal = 0
    for case, expected in zip(CASES, STORED["small"][name], strict=True):
        ours = _rendered(template, case)
        if expected is None:
            assert ours is None, case
        elif ours is not None and not ours.notes:  # a note means that a message was adapted
            assert ours.text == expected, case
            equal += 1
    assert equal >= 8


@pytest.mark.parametrize("name", STORED["crc32"])
def test_reference_templates(name: str) -> None:
    template = chat_template(reference("templates", name).read_text(encoding="utf-8"), NOW)
    equal = 0
    for case, expected in zip(CASES, STORED["crc32"][name].split(), strict=True):
        ours = _rendered(template, case, name) if expected != REFUSED else None
        if ours is None or ours.notes or (name == ESCAPED and CASES[case][1]["tools"]):
            assert ours is not None or expected == REFUSED, case
            continue
        assert checksum(ours.text) == expected, case
        equal += 1
    assert equal >= 1
