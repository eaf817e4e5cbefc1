"""HTML elements. Text is escaped and control characters are made visible; a `Node` is inserted as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from localllm.base.printable import printable

_EMPTY = {"meta", "line", "rect"}  # void elements; the last two are SVG elements and self-closing


class Node(str):
    """Text that is already HTML."""

    __slots__ = ()


def element(tag: str, *content: str, cls: str = "", **attributes: str) -> Node:
    """Return an element. `cls` is its class; in attribute names "_" becomes "-"."""
    given = {"class": cls, **attributes} if cls else attributes
    told = "".join(f' {name.replace("_", "-")}="{_escaped(value)}"' for name, value in given.items())
    if tag in _EMPTY and not content:
        return Node(f"<{tag}{told}/>" if tag != "meta" else f"<{tag}{told}>")
    return Node(
        f"<{tag}{told}>{''.join(each if isinstance(each, Node) else _escaped(each) for each in content)}</{tag}>"
    )


class Row(NamedTuple):
    """The cells of a table row, and its class."""

    cells: tuple[str, ...]
    cls: str = ""


def html_table(caption: str, header: Sequence[str], rows: Sequence[Row], right: Sequence[int] = ()) -> Node:
    """Return a table that scrolls if it is too wide. The columns in `right` are right-aligned."""
    sides = ["n" if at in right else "" for at in range(len(header))]
    named = [element("th", name, cls=side, scope="col") for name, side in zip(header, sides, strict=True)]
    body = [
        element("tr", *(element("td", cell, cls=n) for cell, n in zip(row.cells, sides, strict=True)), cls=row.cls)
        for row in rows
    ]
    head = element("thead", element("tr", *named))
    return element("div", element("table", element("caption", caption), head, element("tbody", *body)), cls="scroll")


def _escaped(text: str) -> str:
    return escape(printable(text, None, keep="\n"), quote=True)
