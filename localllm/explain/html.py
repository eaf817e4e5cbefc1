"""HTML elements. Text is escaped, and control characters are made visible; only a `Node` is HTML already."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from localllm.printable import printable

_EMPTY = {"meta", "line", "rect"}  # of these, the last two are SVG's and close themselves


class Node(str):
    """Text that is HTML."""

    __slots__ = ()


def element(tag: str, *content: str, cls: str = "", **attributes: str) -> Node:
    """Return an element. `cls` is its class; other names have "-" for "_"."""
    given = {"class": cls, **attributes} if cls else attributes
    told = "".join(f' {name.replace("_", "-")}="{_escaped(value)}"' for name, value in given.items())
    if tag in _EMPTY and not content:
        return Node(f"<{tag}{told}/>" if tag != "meta" else f"<{tag}{told}>")
    return Node(
        f"<{tag}{told}>{''.join(each if isinstance(each, Node) else _escaped(each) for each in content)}</{tag}>"
    )


class Row(NamedTuple):
    """The cells of a row of a table, and its class."""

    cells: tuple[str, ...]
    cls: str = ""


def table(caption: str, header: Sequence[str], rows: Sequence[Row], right: Sequence[int] = ()) -> Node:
    """Return a table that scrolls by itself where it is too wide; the columns in `right` align right."""

    def row(tag: str, each: Row, **attributes: str) -> Node:
        inside = [
            element(tag, cell, cls="n" if at in right else "", **attributes) for at, cell in enumerate(each.cells)
        ]
        return element("tr", *inside, cls=each.cls)

    head = element("thead", row("th", Row(tuple(header)), scope="col"))
    body = element("tbody", *(row("td", each) for each in rows))
    return element("div", element("table", element("caption", caption), head, body), cls="scroll")


def _escaped(text: str) -> str:
    return escape(printable(text, None, keep="\n"), quote=True)
