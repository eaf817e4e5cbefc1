"""HTML elements of the page: content is escaped, so it cannot become markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from localllm.explain.html import Node, Row, element, html_table

HOSTILE = ["<b>", "</p>", "&amp;", '"><script>', "'", "a & b", "]]>", "<!--"]


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.found.append(data)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_and_attributes_come_back_unchanged(text: str) -> None:
    assert Reader(element("p", text, title=text, cls=text)).found == [("p", {"class": text, "title": text}), text]


def test_only_a_node_is_markup() -> None:
    assert element("p", Node("<b>"), "<b>") == "<p><b>&lt;b&gt;</p>"
    assert isinstance(element("p", "x") + "y", str)
    assert not isinstance(element("p", "x") + "<y>", Node)  # a concatenated string is no longer trusted


def test_controls_are_made_visible() -> None:
    assert element("p", "a\x1b[0m\u202eb\nc") == "<p>a\\x1b[0m\\u202eb\nc</p>"


def test_columns_of_numbers() -> None:
    found = html_table("t", ("a", "n"), [Row(("x", "<1"), "chosen")], right=(1,))
    assert '<th scope="col">a</th><th class="n" scope="col">n</th>' in found
    assert '<tr class="chosen"><td>x</td><td class="n">&lt;1</td></tr>' in found
