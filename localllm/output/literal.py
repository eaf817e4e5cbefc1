"""Convert values written by models to JSON while they stream.

JSON passes unchanged. Python's keywords and quotes, Gemma's quotes and bare keys, raw line breaks in strings, and
trailing commas are converted. Any other text ends the value. The output is then an incomplete JSON value, never a
complete one.
"""

from __future__ import annotations

import json
import re
import sys

from localllm.output.incoming import Incoming, Markers, Show, Wait, run_whole
from localllm.template.format import SPACES

MOST_DEPTH = 100
_MOST_NUMBER = 400  # characters
_MOST_KEY = 256
_MOST_GAP = 1 << 30

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DIGITS = re.compile(r"[-+.0-9eE]*")
_LETTERS = re.compile(r"[A-Za-z]*")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]*") for quote in "\"'"}
_DIGITS_OF = {"u": 4, "x": 2, "U": 8}  # hexadecimal digits of an escape
_HEX = re.compile("[0-9a-fA-F]*")


def escaped(text: str) -> str:
    """Return `text` escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal(text: Incoming, show: Show, mark: str = "") -> Wait[bool]:
    """Convert the next value and return whether it is complete. Text after the value is not consumed.

    With `mark`, strings are between marks and have no escapes, and keys may be bare.
    """
    closers: list[str] = []
    comma = ""  # written if another item follows
    while True:  # before an item: a value, or a key and its value
        gap = yield from text.spaces(_MOST_GAP)
        first = yield from text.peek()
        if closers and first == closers[-1]:  # an empty container, or a trailing comma
            show(gap + closers.pop())
            text.take(1)
        else:
            show(comma + gap if closers else "")
            if closers and closers[-1] == "}" and not (yield from _key(text, show, mark)):
                return False
            first = yield from text.peek()
            if first and first in "{[":
                if len(closers) == MOST_DEPTH:
                    return False
                show(text.take(1))
                closers.append(_CLOSERS[first])
                comma = ""
                continue
            if not (yield from _scalar(text, show, mark)):
                return False
        while closers:  # after a value
            gap = yield from text.spaces(_MOST_GAP)
            next_ = yield from text.peek()
            if next_ == closers[-1]:
                show(gap + text.take(1))
                closers.pop()
            elif next_ == ",":
                text.take(1)
                comma = gap + ","
                break
            else:
                return False
        if not closers:
            return True


def _key(text: Incoming, show: Show, mark: str) -> Wait[bool]:
    """Convert a key and its colon."""
    first = yield from text.peek()
    if mark and first not in ('"', "'", "<"):
        name = yield from text.run(_BARE, _MOST_KEY)
        if not name:
            return False
        show(f'"{escaped(name.strip(SPACES))}"')
    elif not (yield from _string(text, show, mark)):
        return False
    gap = yield from text.spaces(_MOST_GAP)
    if not (yield from text.accept(":")):
        return False
    show(gap + ":" + (yield from text.spaces(_MOST_GAP)))
    return True


_BARE = re.compile(r"[^:{}\[\],\"]*")


def _scalar(text: Incoming, show: Show, mark: str) -> Wait[bool]:
    """Convert a string, a number or a word."""
    first = yield from text.peek()
    if first in ('"', "'") or (mark and first == mark[0]):
        return (yield from _string(text, show, mark))
    number = yield from text.run(_DIGITS, _MOST_NUMBER)
    if number:
        if not _NUMBER.fullmatch(number):
            return False
        show(number)
        return True
    word = yield from text.run(_LETTERS, 8)
    show(_WORDS.get(word, ""))
    return word in _WORDS


def _string(text: Incoming, show: Show, mark: str) -> Wait[bool]:
    """Convert a string."""
    if mark and (yield from text.accept(mark)):
        show('"')
        if not (yield from text.until(Markers((mark,)), lambda part: show(escaped(part)))):
            return False
        show('"')
        return True
    quote = yield from text.peek()
    if quote not in _PLAIN:
        return False
    text.take(1)
    show('"')
    plain = show if quote == '"' else lambda part: show(escaped(part))
    while True:
        if (yield from text.flow(_PLAIN[quote], 1 << 16, plain)):
            continue
        next_ = yield from text.peek()
        if next_ == quote:
            text.take(1)
            show('"')
            return True
        if next_ == "\\":
            if not (yield from _escape(text, show)):
                return False
        elif next_:
            show(escaped(text.take(1)))  # a raw control character
        else:
            return False


def _escape(text: Incoming, show: Show) -> Wait[bool]:
    """Convert an escape of JSON or Python. A backslash before any other character is literal."""
    pair = yield from text.peek(2)
    if len(pair) < 2:
        return False
    text.take(2)
    letter = pair[1]
    if letter in _DIGITS_OF:
        digits = yield from text.run(_HEX, _DIGITS_OF[letter])
        if len(digits) == _DIGITS_OF[letter] and int(digits, 16) <= sys.maxunicode:
            show(f"\\u{digits}" if letter == "u" else json.dumps(chr(int(digits, 16)))[1:-1])
        elif (yield from text.peek()):
            show("\\\\" + letter + digits)
        else:
            return False
    elif letter in '"\\/bfnrt':
        show(pair)
    elif letter != "\n":  # Python: line continuation
        show(escaped(letter) if letter == "'" else "\\\\" + escaped(letter))
    return True


def converted(text: str) -> str | None:
    """Return `text` as JSON if it is a single complete value, else None."""
    parts: list[str] = []
    whole, consumed = run_whole(lambda incoming: literal(incoming, parts.append), text.strip(SPACES))
    return "".join(parts) if whole and consumed else None


def plain_string(text: str, most: int) -> str | None:
    """Return the string that `text`, a value in JSON, encodes. Return None if it is missing, no string, or longer than
    `most`.
    """
    if not text or len(text) > 6 * most + 2:
        return None
    value = json.loads(text)
    return value if isinstance(value, str) and len(value) <= most else None
