"""HTML elements. Text is escaped, and control characters are made visible; only a `Node` is HTML already."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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


def cells(*content: str, right: Sequence[int] = (), cls: str = "") -> Node:
    """Return a row of a table; the cells with the numbers in `right` align right."""
    row = [element("td", each, cls="n" if number in right else "") for number, each in enumerate(content)]
    return element("tr", *row, cls=cls)


def table(caption: str, header: Sequence[str], rows: Sequence[Node]) -> Node:
    """Return a table that scrolls by itself where it is too wide."""
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in header)))
    inside = element("table", element("caption", caption), head, element("tbody", *rows))
    return element("div", inside, cls="scroll")


def _escaped(text: str) -> str:
    return escape(printable(text, None, keep="\n"), quote=True)
