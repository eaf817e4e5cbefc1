"""Markdown on a terminal while it streams: headings, lists, quotes, code, tables and emphasis.

The cursor never moves back over written output, so answers may be longer than the screen. The start of a line, a line
of code and a table are held back until they are complete. The text must be printable (`localllm.base.printable`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import Literal

from localllm.cli.terminal.inline import BOLD, ITALIC, LINK, Inline, parsed
from localllm.cli.terminal.wrapping import Wrapped, cells, painted

DIM, HEADING, QUOTE = "2", "1;4", "2"
_LANGUAGES = (  # languages whose highlighting is known to be quick on any text
    "bash", "c", "cpp", "css", "diff", "go", "html", "ini", "java", "javascript", "js", "json", "php", "py", "python",
    "ruby", "rust", "sh", "shell", "sql", "toml", "ts", "typescript", "xml", "yaml",
)  # fmt: skip
_MOST_LINE = 400  # maximum characters of a highlighted line of code
_MOST_ROWS = 200  # maximum rows of a table that are held back
_FENCE = re.compile(r"( *)(`{3,}|~{3,})([^`]*)$")
_RULE = re.compile(r"(?:-{3,}|\*{3,}|_{3,}) *$")
_DELIMITER = re.compile(r"\|? *:?-+:? *(\| *:?-+:? *)*\|? *$")

Start = Literal["heading", "item", "quote", "row", "fence", "text"]
# pattern of a complete line start, and of its possible beginning
_STARTS: tuple[tuple[Start, re.Pattern[str], re.Pattern[str]], ...] = (
    ("heading", re.compile(r"#{1,6} +"), re.compile(r"#{1,6}")),
    (
        "item",
        re.compile(r"(?:[-*+]|\d{1,3}[.)]) +(?:\[[ xX]\] +)?(?=\S)"),
        re.compile(r"(?:[-*+]|\d{1,3}[.)])(?: {1,80}(?:\[(?:[ xX](?:\] {0,80})?)?)?)?|\d{1,3}"),
    ),
    ("quote", re.compile(r"> ?"), re.compile(r">")),
    ("row", re.compile(r"\|"), re.compile(r"(?!)")),
    ("fence", re.compile(r"`{3}|~{3}"), re.compile(r"`{1,2}|~{1,2}")),
    ("text", re.compile(r"(?![-*_])"), re.compile(r"-{1,80} *|\*{1,80} *|_{1,80} *")),  # perhaps a horizontal rule
)


class Markdown:
    """Writes Markdown through `out`."""

    def __init__(self, out: Wrapped) -> None:
        self._out, self._inline = out, Inline()
        self._start: str | None = ""  # the start of a line while its kind is unknown; None: the kind is known
        self._whole: Start | None = None  # the kind of a line that is held back until it is complete
        self._style = ""
        self._fence = ""  # the marker that ends the code
        self._language = ""
        self._rows: list[str] = []

    def text(self, text: str) -> None:
        """Write a chunk of the text."""
        for letter in text:
            if letter == "\n":
                self._end_line()
            elif self._start is None:
                self._write(letter)
            else:
                self._start += letter
                if not self._fence and self._whole is None:
                    self._begin(False)
        self._out.flush()

    def end(self) -> None:
        """End the text and its last line."""
        if self._start or self._start is None:
            self._end_line()
        self._end_table()
        self._out.end()

    # -- lines -----------------------------------------------------------------------------------------------------

    def _begin(self, ended: bool) -> None:
        """Determine the kind of line from its start, and write the start."""
        assert self._start is not None
        body = self._start.lstrip(" ")
        indent = self._start[: len(self._start) - len(body)]
        if not body:
            return
        for kind, begins, may in _STARTS:
            if not ended and may.fullmatch(body):
                return
            found = begins.match(body)
            if found is not None or kind == "text":
                break
        if kind in ("row", "fence"):
            self._whole = kind
            return
        self._end_table()
        rest, self._start = body, None
        if kind == "heading" and found is not None:
            rest, self._style = body[found.end() :], HEADING
        elif kind == "item" and found is not None:
            self._mark(indent + _item_mark(found[0]), "")
            rest = body[found.end() :]
        elif kind == "quote" and found is not None:
            self._mark(indent + "│ ", QUOTE)
            rest = body[found.end() :]
        else:
            self._mark(indent, "")
        for letter in rest:
            self._write(letter)

    def _mark(self, mark: str, style: str) -> None:
        """Write the marker of a line, and indent continuation lines to match."""
        mark = mark if cells(mark) < self._out.width // 2 else mark.lstrip(" ")
        self._out.whole(painted(mark, style), cells(mark))
        self._out.hang(painted(mark, style) if style else " " * cells(mark), cells(mark))

    def _end_line(self) -> None:
        if self._fence:
            self._code(self._start or "")
        elif self._start is None:
            self._finish()
        elif self._whole == "row":
            self._rows.append(self._start)
            if len(self._rows) >= _MOST_ROWS:
                self._end_table()
        elif self._whole == "fence":
            self._open(self._start)
        elif _RULE.fullmatch(self._start.strip()):
            self._end_table()
            self._out.whole(painted("─" * min(self._out.width, 40), DIM), 0)
            self._finish()
        else:
            self._begin(True)
            self._end_table()
            self._finish()
        self._start, self._whole = "", None

    def _finish(self) -> None:
        for text, style in self._inline.end():
            self._out.text(text, self._both(style))
        self._out.line()
        self._out.hang()
        self._style = ""

    def _write(self, letter: str) -> None:
        for text, style in self._inline.push(letter):
            self._out.text(text, self._both(style))

    def _both(self, style: str) -> str:
        return f"{self._style};{style}" if self._style and style else self._style or style

    # -- code ------------------------------------------------------------------------------------------------------

    def _open(self, line: str) -> None:
        """Begin a code block if the line is a valid fence."""
        self._end_table()
        found = _FENCE.fullmatch(line)
        if found is None:
            self._start = None
            self._mark(" " * (len(line) - len(line.lstrip(" "))), "")
            for letter in line.lstrip(" "):
                self._write(letter)
            self._finish()
            return
        self._fence, self._language = found[2], found[3].strip().split(" ")[0].lower()
        self._out.whole(painted(line, DIM), cells(line))
        self._out.line()

    def _code(self, line: str) -> None:
        """Write a line of code, or end the block at its closing fence."""
        line = line.expandtabs(4)
        bare = line.strip()
        if bare.startswith(self._fence) and not bare.strip(self._fence[0]):
            self._fence = ""
            self._out.whole(painted(line, DIM), cells(line))
        else:
            self._out.whole(highlighted(line, self._language), cells(line))
        self._out.line()

    # -- tables ----------------------------------------------------------------------------------------------------

    def _end_table(self) -> None:
        """Write the rows that were held back."""
        rows, self._rows = self._rows, []
        if len(rows) > 1 and _DELIMITER.fullmatch(rows[1].strip()):
            for line in markdown_table([_cells(row) for row in (rows[0], *rows[2:])], self._out.width):
                self._out.whole(line, 0)
                self._out.line()
            return
        for row in rows:
            for text, style in parsed(row):
                self._out.text(text, style)
            self._out.line()


def _item_mark(marker: str) -> str:
    """Return the bullet, number or box that is shown for the marker of a list item, such as `- [x] `."""
    number = marker.split(" ")[0] + " " if marker[0].isdigit() else ""
    if "[" in marker:
        return number + ("☐ " if "[ ]" in marker else "☑ ")
    return marker if number else "• "


def _cells(row: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def _ansi(renderable: object, width: int) -> list[str]:
    """Return the lines that rich renders, in the 16 standard colours."""
    from rich.console import Console

    stream = StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system="standard", legacy_windows=False)
    console.print(renderable, end="", highlight=False, markup=False, emoji=False)
    return [line.rstrip() for line in stream.getvalue().rstrip("\n").split("\n")]


def highlighted(line: str, language: str) -> str:
    """Return a line of code with syntax highlighting, if the language is supported."""
    if language not in _LANGUAGES or len(line) > _MOST_LINE:
        return line
    from rich.syntax import Syntax

    text = Syntax("", language, theme="ansi_dark").highlight(line)
    text.rstrip()
    if text.plain != line.rstrip():
        return line
    return "".join(_ansi(text, 10 * _MOST_LINE))


def markdown_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table, whose first row is the header."""
    from rich.box import SIMPLE_HEAD
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    def cell(content: str) -> Text:
        made = Text()
        for text, style in parsed(content):
            parts = style.split(";")
            bold, italic, underline = (True if each in parts else None for each in (BOLD, ITALIC, LINK))
            made.append(text, Style(bold=bold, italic=italic, underline=underline))
        return made

    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    columns = len(rows[0])
    for content in rows[0]:
        made.add_column(cell(content), overflow="fold")
    for row in rows[1:]:
        made.add_row(*(cell(content) for content in [*row, *[""] * columns][:columns]))
    return _ansi(made, width)
