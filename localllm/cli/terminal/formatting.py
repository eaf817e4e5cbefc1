"""Format numbers and tables as text: sizes, counts, and Markdown tables that are readable as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.base.printable import printable
from localllm.base.units import size as size
from localllm.cli.terminal.wrapping import broken, longest

_AGES = ((365 * 86400, "year"), (30 * 86400, "month"), (86400, "day"), (3600, "hour"), (60, "minute"))


def age(seconds: float) -> str:
    """Format an age in words: "3 days ago"."""
    for unit, name in _AGES:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "now"


def parameters(count: int) -> str:
    """Format a parameter count as llama-bench does: "0.29 M", "1.24 B"."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def rate_text(rate: float) -> str:
    """Format tokens per second."""
    return f"{rate:.{0 if rate >= 10 else 1}f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Return a Markdown table with aligned columns. Columns in `right` are right-aligned."""
    rows = [_cells(row) for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = [("-" * (w - 1) + ":") if name in right else "-" * w for name, w in zip(header, widths, strict=True)]
    return "\n".join(markdown_row(header, row, widths, right) for row in (header, rule, *rows))


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), room: int = 0) -> str:
    """Return a Markdown table. If it exceeds a terminal of `room` columns, empty columns are dropped.

    If it still does not fit, it is transposed: each row becomes a block with a line for every cell that is not empty.
    """
    whole = markdown(header, rows, right)
    if not room or len(whole.partition("\n")[0]) <= room:
        return whole
    used = [number for number in range(len(header)) if any(row[number].strip() for row in rows)]
    left = [[row[number] for number in used] for row in (header, *rows)]
    less = markdown(left[0], left[1:], right)
    if len(less.partition("\n")[0]) <= room:
        return less
    return "\n\n".join(record(header, row, room) for row in rows)


def record(header: Sequence[str], row: Sequence[str], room: int) -> str:
    """Return a row of a transposed table: a line for every cell that is not empty."""
    pairs = [(name, cell) for name, cell in zip(header, row, strict=True) if cell.strip()]
    return in_columns(pairs, indent=0, room=room)


def listing(header: Sequence[str], rows: Sequence[Sequence[str]], room: int = 0) -> str:
    """Return rows in columns, without the empty ones. In a terminal of `room` columns that is too narrow, each row has
    its first cell on a line, and the others below, without the header."""
    used = [number for number in range(len(header)) if any(row[number] for row in rows)]
    wide = in_columns([[row[number] for number in used] for row in (header, *rows)], indent=0)
    if not room or max(map(len, wide.split("\n"))) <= room:
        return wide
    lines = []
    for name, *rest in map(_cells, rows):
        lines += [*broken(name, room), *broken("  " + ", ".join(filter(None, rest)), room, "  ")]
    return "\n".join(lines)


def markdown_row(header: Sequence[str], row: Sequence[str], widths: Sequence[int], right: Sequence[str]) -> str:
    cells = [
        cell.rjust(width) if name in right else cell.ljust(width)
        for name, cell, width in zip(header, _cells(row), widths, strict=True)
    ]
    return "| " + " | ".join(cells) + " |"


def _cells(row: Sequence[str]) -> list[str]:
    """Return cells as single lines, since values from a file may contain line breaks."""
    return [printable(cell, None) for cell in row]


def in_columns(rows: Sequence[Sequence[str]], indent: int = 2, room: int = 0) -> str:
    """Align rows in columns, with a ragged last column.

    In a terminal of `room` columns the last column wraps at words. It moves to the next line if the others leave too
    little room for it, or for its longest word.
    """
    rows = [_cells(row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    before = indent + sum(widths) + 2 * len(widths)
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        line = " " * indent + "  ".join([*cells, row[-1]])
        if not room or len(line) <= room:
            lines.append(line)
        elif before <= min(room * 0.6, room - longest(row[-1], room)):
            lines += broken(line, room, " " * before)
        else:
            head = " " * indent + "  ".join(cell.strip() for cell in row[:-1] if cell.strip())
            below = " " * min(indent + 4, max(room - longest(row[-1], room), 0))
            lines += [*broken(head, room, below), *broken(below + row[-1], room, below)]
    return "\n".join(lines)
