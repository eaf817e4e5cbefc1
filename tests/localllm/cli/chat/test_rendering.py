"""Answers on a terminal: Markdown, word wrap, reasoning. Model output never reaches the terminal as control
sequences.
"""

from __future__ import annotations

import io
import os
import pty
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from localllm.cli.options import DisplayOptions
from localllm.cli.terminal.formatting import in_columns
from localllm.cli.terminal.inline import parsed
from localllm.cli.terminal.markdown import Markdown
from localllm.cli.terminal.shown import MarkdownShown, PlainShown, shown_on
from localllm.cli.terminal.wrapping import Wrapped, broken
from tests.localllm.support import CHATML, Terminal, localllm, write_model

SGR = re.compile(r"\x1b\[[\d;]*m")
TEXT = """# A heading

Here is **some bold** text with `code` that is long enough to wrap at the edge of the terminal, surely.

- one item that is long enough to wrap around the edge of a narrow terminal, and hangs
- **two**, with *emphasis*
1. first
> a quotation that is long enough to wrap around the edge of a narrow terminal

```python
def f(x):
\treturn x + 1  # **as is**
```
---
| a | b |
|---|---|
| 1 | **two** and a long text in a cell, which has to be broken to fit into the terminal |

-5 degrees, 2 * 3 * 4, snake_case_name, __init__ and **kwargs
中文字符中文字符中文字符中文字符中文字符中文字符中文字符中文字符
the end"""


class Screen(io.StringIO):
    """A terminal that records its output. The width is unknown, so 80 columns apply."""

    def isatty(self) -> bool:
        return True


def rendered(text: str, pieces: int | None = None, width: int = 80) -> str:
    """Return the rendered Markdown of a text, passed whole or, with a seed, in random pieces."""
    stream = Screen()
    with of_width(stream, width) as out:
        markdown, cut = Markdown(Wrapped(out)), random.Random(pieces)
        while text:
            size = len(text) if pieces is None else cut.choice([1, 2, 7, 40])
            markdown.text(text[:size])
            text = text[size:]
        markdown.end()
    return stream.getvalue()


@contextmanager
def of_width(stream: Screen, width: int) -> Iterator[TextIO]:
    master, slave = pty.openpty()
    try:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
        stream.fileno = lambda: slave  # type: ignore[method-assign]
        yield stream
    finally:
        os.close(master)
        os.close(slave)


def plain(text: str) -> list[str]:
    return SGR.sub("", text).split("\n")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_every_line_fits_and_breaks_between_words(width: int) -> None:
    lines = plain(rendered(TEXT, width=width))
    assert max(map(cell_len, lines)) <= width
    words = (
        next(line for line in TEXT.split("\n") if line.startswith("Here")).replace("**", "").replace("`", "").split()
    )
    first = lines.index("") + 1
    assert " ".join(lines[first : lines.index("", first)]).split() == words
    item = next(n for n, line in enumerate(lines) if line.startswith("• one"))
    assert lines[item + 1].startswith("  ") or width == 100
    quoted = [line for line in lines if line.startswith("│ ")]
    # the first word of the next line would not have fit on this one
    assert all(len(one) + len(two.split()[1]) + 1 > width for one, two in pairwise(quoted))
    assert len(quoted) == (2 if width > 40 else 3) - (width == 100)
    assert "    return x + 1  # **as is**" in lines
    assert "-5 degrees, 2 * 3 * 4," in " ".join(lines)
    assert all(word in " ".join(lines) for word in ("snake_case_name", "__init__", "**kwargs"))
    assert not any("|---|" in line for line in lines)


def test_what_is_shown_does_not_depend_on_the_pieces() -> None:
    assert {rendered(TEXT, seed) for seed in range(4)} == {rendered(TEXT)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b** c", [("a ", ""), ("b", "1"), (" c", "")]),
        ("`a*b*c`.", [("a*b*c", "36"), (".", "")]),
        ("***x***", [("x", "1;3")]),
        ("**a *b***", [("a ", "1"), ("b", "1;3")]),
        ("2*3*4 * 5", [("2*3*4 * 5", "")]),
        ("**kwargs", [("**kwargs", "")]),
        ("\\*no\\*", [("*no*", "")]),
        ("C:\\dir \\", [("C:\\dir \\", "")]),
        ("_it_ and a_b_c", [("it", "3"), (" and a_b_c", "")]),
    ],
)
def test_emphasis_in_a_line(text: str, expected: list[tuple[str, str]]) -> None:
    joined: list[tuple[str, str]] = []
    for part, style in parsed(text):
        if joined and joined[-1][1] == style:
            joined[-1] = joined[-1][0] + part, style
        else:
            joined.append((part, style))
    assert joined == expected


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1 \n\t*_`~#|->.\\:\x1b\x9b\x07\r\u202e中\u0301[]m;2J"), max_size=120))
def test_no_answer_steers_the_terminal(text: str) -> None:
    stream = Screen()
    shown = MarkdownShown(stream, hide=False, colours=True)
    shown.reasoning(text)
    shown.content(text[: len(text) // 2])
    shown.content(text[len(text) // 2 :])
    shown.end()
    rest = SGR.sub("", stream.getvalue())
    assert not set(rest) & {"\x1b", "\x9b", "\x07", "\r", "\u202e"}
    kept = [letter for letter in text if letter.isalnum()]
    assert all(letter in rest for letter in kept)


def test_a_word_without_end_is_shown() -> None:
    stream = Screen()
    MarkdownShown(stream, hide=False, colours=True).content("x" * 100 + "a" + "\u0301" * 1000)
    assert stream.getvalue().count("x") == 100
    assert stream.getvalue().count("\u0301") > 600


def test_thoughts_are_dim_or_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for hide in (False, True):
        stream = Screen()
        answer = MarkdownShown(stream, hide, colours=True)
        for text in ("let me ", "**think**"):
            answer.reasoning(text)
        answer.content("It is **so**.")
        answer.end()
        shown.append(stream.getvalue())
    dim, folded = shown
    assert "\x1b[2mlet\x1b[0m" in dim
    assert plain(dim) == ["let me **think**", "", "It is so.", ""]
    assert re.fullmatch(r"thinking \.\.\. 2 tokens, \d+\.\d s", plain(folded)[0])
    assert plain(folded)[1:] == ["It is so.", ""]


def test_a_model_that_thinks(tmp_path: Path) -> None:
    thinking = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    assert thinking != CHATML
    words = ("chat", write_model(tmp_path / "m.gguf", template=thinking), "-n", "6", "--temp", "0", "-t", "1")
    shown, hidden = (localllm(*words, *more, stdin="one\n").stdout for more in ((), ("--hide-think",)))
    assert (len(shown), hidden) == (7, "")
    terminal = Terminal(*words, "--hide-think", columns=100)
    terminal.wait_for(r">>> $")
    terminal.type("one\r")
    terminal.wait_for(r"thinking \.\.\. \d tokens, \d\.\d s\s+first token")
    terminal.wait_for(r">>> $")
    terminal.type("/set hide-think off\r/regen\r")
    terminal.wait_for(re.escape(shown.strip()))
    assert f"\x1b[2m{shown[0]}" in terminal.written
    terminal.wait_for(r">>> $")
    terminal.type("/bye\r")
    assert terminal.end() == 0


def test_pipes_plain_dumb_and_colourless_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(stream: io.StringIO, **display: bool) -> str:
        shown = shown_on(stream, DisplayOptions(**display))
        assert isinstance(shown, PlainShown | MarkdownShown)
        if shown.parted:
            shown.reasoning("hm")
        shown.content("a **b**\n\x1b[2J")
        shown.end()
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert answer(io.StringIO()) == "a **b**\n\x1b[2J\n"  # a pipe gets the raw text
    assert answer(io.StringIO(), hide_think=True) == "a **b**\n\x1b[2J\n"
    assert answer(Screen(), plain=True) == "a **b**\n\\x1b[2J\n"
    assert "\x1b[1mb\x1b[0m" in answer(Screen())
    monkeypatch.setenv("NO_COLOR", "1")
    assert answer(Screen()) == "hm\n\na **b**\n\\x1b[2J\n"
    monkeypatch.setenv("TERM", "dumb")
    assert answer(Screen()) == "a **b**\n\\x1b[2J\n"


def test_lines_and_columns_break_at_words() -> None:
    assert broken("  one two three", 9, "- ") == ["  one two", "- three"]
    assert broken("supercalifragilistic", 5) == ["supercalifragilistic"]
    rows = [("/a", "one two three four"), ("/long NAME", "five")]
    assert in_columns(rows, indent=0) == "/a          one two three four\n/long NAME  five"
    assert in_columns(rows, indent=0, room=22) == ("/a          one two\n            three four\n/long NAME  five")
    assert in_columns(rows, indent=0, room=15) == "/a\n    one two\n    three four\n/long NAME\n    five"


LINKS = """See [the docs](https://x.y/a_b), [1], a[i] = b[j](k l) and `[c](d)**`; **[b](http://e)** [http://q](http://q)!
- [x] done
- [ ] open *it*
- [y] no box
1. [X] numbered
- plain
  - [x] inner [l](m)

| **a** | b |
|---|---|
| 1 | [t](u) |

[unclosed
[a](b
[ ] [] ["""


def test_links_show_their_address_and_boxes_their_mark() -> None:
    shown = rendered(LINKS, width=120)
    lines = [line.rstrip() for line in plain(shown)]
    assert lines[0] == ("See the docs (https://x.y/a_b), [1], a[i] = b[j](k l) and [c](d)**; b (http://e) http://q!")
    assert lines[1:7] == ["☑ done", "☐ open it", "• [y] no box", "1. ☑ numbered", "• plain", "  ☑ inner l (m)"]
    assert lines[-4:-1] == ["[unclosed", "[a](b", "[ ] [] ["]
    assert "\x1b[4mdocs\x1b[0m \x1b[2m(https:" in shown
    assert all(rendered(LINKS, seed, 120) == shown for seed in range(20))


def test_the_words_of_a_table_s_header_are_bold() -> None:
    header = rendered("| one | two |\n|---|---|\n| 1 | 2 |\n").split("\n")[0]
    assert header.count("\x1b[1mone") == header.count("\x1b[1mtwo") == 1
